"""What takes part: something that makes one update after the other on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from case import Case

Updates = Iterator[None]
"""Every ``next`` makes an update."""


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        group: ``vpipe``, ``torch`` (torch.distributed.pipelining) or ``bare``.
        schedule: vpipe's name of it.
        chunks: stages per rank.
        start: makes its updates, on every rank.
    """

    group: str
    schedule: str
    chunks: int
    start: Callable[[Case, int], Updates]

    @property
    def name(self) -> str:
        """Such as ``vpipe 1f1b``."""
        return f"{self.group} {self.schedule}"
