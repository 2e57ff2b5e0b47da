from __future__ import annotations

from collections.abc import Iterator

import pytest
from watched_ranks import Ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    some = Ranks()
    yield some
    some.stop()
