"""What takes part: something that makes one optimizer update after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Updates = Iterator[float | None]
"""Every ``next`` makes an update from the next 16 samples; its loss, None on a rank that does not know it."""


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        name: such as ``"vpipe 1f1b m8"``.
        group: whose it is: ``vpipe``, ``torch`` (torch.distributed.pipelining) or ``plain``.
        start: makes its updates, on every rank that works.
        ranks: which of the two ranks work; the other waits without spinning.
        threads: of every working rank.
        exact: whether its losses are those of plain training, up to rounding.
    """

    name: str
    group: str
    start: Callable[[], Updates]
    ranks: tuple[int, ...] = (0, 1)
    threads: int = 1
    exact: bool = True
