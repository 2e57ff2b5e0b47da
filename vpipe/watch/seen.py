"""A rank as the others see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


def duration(seconds: float) -> str:
    """``6.0 s``, ``31 s``, ``3600 s``."""
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


class Doing(Protocol):
    """A transfer that the main thread is in: its text, ``waiting for the loss of step 3 from stage 1 with rank 2``."""

    @property
    def peer(self) -> int | None:
        """The other rank; None when all take part."""

    @property
    def said(self) -> str:
        """Between "has waited 31 s" and the name of the other rank: ``for the loss of step 3 from stage 1 from``."""

    @property
    def limit_s(self) -> float | None:
        """Seconds after which the watch gives it up, where nothing else may: nccl waits without end for the peer with
        which it makes a communicator."""


@dataclass(frozen=True)
class Waits:
    """A wait for another rank, or for all (None); ``said`` as in :class:`Doing`, None while it is new."""

    peer: int | None
    seconds: float
    said: str | None = None


@dataclass(frozen=True)
class Seen:
    """What is known of a rank, at most a beat old.

    Attributes:
        silent_s: since it was heard.
        left: whether it ended in good order.
        waits: for whom.
        at: what it is at, and for how long; None when that changed a moment ago.
    """

    silent_s: float = 0.0
    left: bool = False
    waits: Waits | None = None
    at: tuple[str | None, float] | None = None

    @property
    def waited_s(self) -> float:
        """How long it has waited; a rank that left or is silent waits for nobody."""
        return 0.0 if self.waits is None or self.left else self.waits.seconds

    @property
    def is_waiting(self) -> bool:
        """For longer than any transfer takes."""
        return self.waits is not None and self.waits.said is not None and not self.left

    def __str__(self) -> str:
        """The predicate of a sentence, but for whom it waits for."""
        if self.left:
            return "has ended its program"
        if self.at is None:
            return "is at work, at nothing for long"
        what, seconds = self.at
        where = f"{what} for" if what is not None else "outside of the pipeline, in the program that runs it, for"
        return f"has been {where} {duration(seconds)}"

    @classmethod
    def of(cls, silent_s: float, left: bool, waits: Sequence[Any] | None, at: Sequence[Any] | None) -> Seen:
        """Of a message of the hub."""
        return cls(silent_s, left, None if waits is None else Waits(*waits), None if at is None else (at[0], at[1]))
