from __future__ import annotations

from collections.abc import Iterator

import pytest
from world import World


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two ranks over gloo, for all tests of habits; they end in good order when the session ends."""
    ranks = World(2, tmp_path_factory.mktemp("two"))
    yield ranks
    statuses = ranks.close()
    assert not any(statuses), f"ranks ended with {statuses}"
