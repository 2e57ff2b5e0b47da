"""How often ranks say that they are alive, and when silence is a failure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Seconds that follow from the timeout of a job, so that all is over when it is.

    Attributes:
        beat_s: between two signs of life.
        silent_s: without any, after which a rank counts as lost.
        grace_s: what a process that was told of a failure has to say so, before it is ended.
        long_s: a wait of which it is told who waits for whom.
    """

    beat_s: float
    silent_s: float
    grace_s: float
    long_s: float

    @classmethod
    def of(cls, timeout_s: float) -> Pace:
        """60 s: a beat per second, long after 30 s, silent after 45 s, 5 s of grace; the rest is for processes to end,
        which takes torch's half a second on a quiet machine and ten on a busy one."""
        return cls(min(1.0, timeout_s / 20), timeout_s - min(15.0, 0.4 * timeout_s), min(5.0, timeout_s / 6),
                   timeout_s / 2)
