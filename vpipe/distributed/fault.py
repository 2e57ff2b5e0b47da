"""Say which failure ended a job, and of which ranks: one sentence and one hint, whatever started the ranks.

The failure detector and the watchdogs find faults from inside the job, a launcher sees how processes end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vpipe.distributed.environment import alone_hint
from vpipe.errors import RunError, UserError


def duration(seconds: float) -> str:
    """Return ``6.0 s``, ``31 s``, ``3600 s``."""
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


@dataclass(frozen=True)
class Fault:
    """The first failure of a job.

    Attributes:
        ranks: those that failed, all at once when their host did; none where no one of them is to blame.
        what: the predicate of a sentence about them, else the sentence; see :meth:`sentence`.
        hint: the remedy.
        chain: who waited for whom, in words, where a transfer took too long.
        reported: whether the rank that failed prints the error itself, as it ends.
    """

    ranks: tuple[int, ...]
    what: str
    hint: str
    chain: str = field(default="", compare=False)
    reported: bool = False

    @classmethod
    def ended(cls, *ranks: int) -> Fault:
        """Build the fault of processes that are gone and did not report why."""
        return cls(ranks, "died without a message",
                   "see the rank's output or log; a process that is killed prints nothing (Linux kills one when "
                   "memory runs out)")

    @classmethod
    def silent(cls, seconds: float, *ranks: int) -> Fault:
        """Build the fault of processes without heartbeats: stopped, cut off, or their host is."""
        return cls(ranks, f"gave no sign of life for {duration(seconds)}",
                   "its process is stopped, or its host is down or cut off; a longer pause needs a larger timeout_s")

    @classmethod
    def absent(cls, seconds: float, refused: int, *ranks: int) -> Fault:
        """Build the fault of processes that never connected; ``refused``: processes that had another key."""
        return cls(ranks, f"did not join within {seconds:g} s"
                   + (f" (refused {refused} that did not know this run's secret)" if refused else ""),
                   "see the rank's output or log: the rank ended, is slow to start (then raise timeout_s), or looks "
                   "for the others elsewhere" + (", or has another VPIPE_SECRET" if refused else "")
                   + (f"; {alone}" if (alone := alone_hint(os.environ)) else ""))

    @classmethod
    def busy(cls, rank: int) -> Fault:
        """Build the fault of a process that is alive, waits for nobody and does not do what another waits for."""
        return cls((rank,), "is running but did not answer in time",
                   "a rank is stuck or much slower than the others: see the rank's output or log; a slow start "
                   "needs a larger timeout_s")

    @classmethod
    def circle(cls, *ranks: int) -> Fault:
        """Build the fault of processes that are alive and wait for one another."""
        return cls(ranks, "wait for one another: a deadlock",
                   "every rank must go through the same batches and calls; if they do, a link between them is down")

    @classmethod
    def hung_up(cls, rank: int, by: int | None) -> Fault:
        """Build the fault of a connection that broke although both processes are alive; None: that with all others."""
        whom, between = ("the others", "them") if by is None else (f"rank {by}", "the two")
        return cls((rank,), f"lost its connection with {whom}",
                   f"see the rank's output or log, and look at the network between {between}")

    @classmethod
    def left(cls, rank: int) -> Fault:
        """Build the fault of a process that came to its end too early."""
        return cls((rank,), "has ended its program", "every rank must go through the same batches and calls")

    @classmethod
    def failed(cls, rank: int, error: BaseException) -> Fault:
        """Build the fault of a rank that raised an error and reports it itself."""
        how, hint = reason_of(error), "that rank has printed its traceback, or written it to its log"
        if isinstance(error, RunError):
            places = ", ".join(f"{name} {value}" for name, value in (("microbatch", error.microbatch),
                                                                     ("action", error.action)) if value is not None)
            how, hint = how + (f" ({places})" if places else ""), error.hint
        elif isinstance(error, UserError):
            hint = error.problems[0].hint
        return cls((rank,), f"failed: {how}", hint, reported=True)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Fault:
        return cls(**{**message, "ranks": tuple(message["ranks"])})

    @property
    def is_death(self) -> bool:
        """Whether the processes are gone and did not report why."""
        return self.what == Fault.ended().what

    @property
    def may_follow(self) -> bool:
        """Whether it may come of another rank's end."""
        return may_follow(self.what)

    def sentence(self, place: Callable[[int], str]) -> str:
        """Return who failed and how: ``rank 2 (stage 2) on host1 died without a message``.

        Args:
            place: ``rank -> "rank 2 (stage 2) on host1"``.
        """
        return f"{', '.join(map(place, self.ranks))} {self.what}".lstrip()

    def knowing(self, *how: str) -> Fault:
        """Add what only the starter of the ranks knows: ``died without a message, killed by signal 9 (SIGKILL)``."""
        return replace(self, what=", ".join([self.what, *([" and ".join(dict.fromkeys(how))] if how else [])]))


def reason_of(error: BaseException) -> str:
    """Return why a rank failed, in a line, by what it has raised."""
    if isinstance(error, RunError):
        return error.what
    if isinstance(error, UserError):
        return error.problems[0].what
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def may_follow(text: str) -> bool:
    """Return whether an error may come of another rank's end, by what sockets, gloo and nccl say then; or of another
    batch there, by what has arrived."""
    return re.search(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|from rank \d+ are ",
                     text) is not None
