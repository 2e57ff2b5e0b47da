from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is let go is let go at once, not when the collector comes by."""
    gc.disable()
    yield
    gc.enable()
