"""The folder's helpers by name, and the worlds of processes its tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four ranks over gloo, for the whole session; they end in good order when it ends."""
    four = World(4, tmp_path_factory.mktemp("world"))
    yield four
    statuses = four.close()
    assert not any(statuses), f"ranks ended with {statuses}"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[World]:
    """Two ranks over gloo, for one test that makes them fail."""
    two = World(2, tmp_path)
    yield two
    two.kill()
