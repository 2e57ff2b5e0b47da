"""What is said of work that shows nothing by itself, once it takes long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

SLOW_S = 2.0

LOADING_TORCH = "loading PyTorch"
"""1.5 s of a core; ten on a machine that is busy, or has not read it before."""


@contextmanager
def said_when_slow(text: str, show: bool = True) -> Iterator[None]:
    """Print a line on stderr if this takes longer than two seconds."""
    timer = Timer(SLOW_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if show:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
