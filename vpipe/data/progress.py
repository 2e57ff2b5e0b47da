"""A progress line for what takes longer than a moment."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sized
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
_PATIENCE_S = 2.0


def progress(items: Iterable[Item], what: str, *, unit: str, total: int | None = None) -> Iterable[Item]:
    """``items``, with a line on stderr that appears only if going through them takes over two seconds.

    ``total``: how many there are, where it is known and ``items`` has no length.
    """
    total = len(items) if isinstance(items, Sized) else total
    interval_s = 0.1 if sys.stderr.isatty() else 10.0  # a log file wants few lines
    return tqdm(items, desc=what, unit=unit, total=total, delay=_PATIENCE_S, mininterval=interval_s,
                file=sys.stderr, leave=False)
