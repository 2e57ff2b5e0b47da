"""Describe the first failure of a job, and the timing that declares one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vpipe.errors import RunError, UserError


@dataclass(frozen=True)
class WatchdogTiming:
    """Seconds that follow from the timeout of a job, so that all is over when it is.

    Attributes:
        beat_s: between two signs of life.
        silent_s: without any, after which a rank counts as lost.
        grace_s: for a process that knows of a failure to report it, before it is ended.
        long_s: a wait that is reported, with who waits for whom.
        join_s: what a rank may take to connect for the first time.
    """

    beat_s: float
    silent_s: float
    grace_s: float
    long_s: float
    join_s: float = 60.0

    @classmethod
    def from_timeout(cls, timeout_s: float) -> WatchdogTiming:
        """Return the timing for a timeout.

        For 60 s: a beat per second, long after 30 s, silent after 45 s, 5 s of grace. The rest is for processes to end,
        which takes half a second on a quiet machine and ten on a busy one.
        """
        return cls(min(1.0, timeout_s / 20), timeout_s - min(15.0, 0.4 * timeout_s), min(5.0, timeout_s / 6),
                   timeout_s / 2, timeout_s)


def duration(seconds: float) -> str:
    """``6.0 s``, ``31 s``, ``3600 s``."""
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


@dataclass(frozen=True)
class Fault:
    """The first failure of a job.

    Attributes:
        ranks: those that failed, all at once when their host did.
        what: the predicate of a sentence about them.
        hint: the remedy.
        chain: who waited for whom, in words, where a transfer took too long; the first to notice tells all.
        reported: whether the rank that failed prints the error itself, as it ends.
    """

    ranks: tuple[int, ...]
    what: str
    hint: str
    chain: str = field(default="", compare=False)
    reported: bool = False

    @classmethod
    def ended(cls, *ranks: int) -> Fault:
        """Return the fault of processes that are gone and did not say why."""
        return cls(ranks, "ended without a word",
                   "see what it printed, or its log; a process that is killed prints nothing (Linux kills one when "
                   "memory runs out)")

    @classmethod
    def silent(cls, seconds: float, *ranks: int) -> Fault:
        """Return the fault of processes of which nothing is heard: stopped, cut off, or their host is."""
        return cls(ranks, f"gave no sign of life for {duration(seconds)}",
                   "its process is stopped, or its host is down or cut off; a longer pause needs a larger timeout_s")

    @classmethod
    def absent(cls, seconds: float, *ranks: int) -> Fault:
        """Return the fault of processes that never connected."""
        return cls(ranks, f"did not join within {seconds:g} s",
                   "see what it printed, or its log: it ended, is slow to start (then raise timeout_s), or looks for "
                   "the others elsewhere")

    @classmethod
    def busy(cls, rank: int) -> Fault:
        """Return the fault of a process that is alive, waits for nobody and does not do what another waits for."""
        return cls((rank,), "is running but did not answer in time",
                   "a rank is stuck or much slower than the others: see what it printed, or its log; a slow start "
                   "needs a larger timeout_s")

    @classmethod
    def circle(cls, *ranks: int) -> Fault:
        """Return the fault of processes that are alive and wait for one another."""
        return cls(ranks, "wait for one another: a deadlock",
                   "every rank must go through the same batches and calls; if they do, a link between them is down")

    @classmethod
    def hung_up(cls, rank: int, by: int) -> Fault:
        """Return the fault of a connection that broke although both processes are alive."""
        return cls((rank,), f"lost its connection with rank {by}", "see what it printed, or its log, and look at "
                   "the network between the two")

    @classmethod
    def left(cls, rank: int) -> Fault:
        """Return the fault of a process that came to its end too early."""
        return cls((rank,), "has ended its program", "every rank must go through the same batches and calls")

    @classmethod
    def failed(cls, rank: int, error: BaseException) -> Fault:
        """Return the fault of a rank that raised an error and reports it itself."""
        hint = "that rank has printed its traceback, or written it to its log"
        if isinstance(error, RunError):
            places = ", ".join(f"{name} {value}" for name, value in (("microbatch", error.microbatch),
                                                                     ("action", error.action)) if value is not None)
            how, hint = error.what + (f" ({places})" if places else ""), error.hint
        elif isinstance(error, UserError):
            how, hint = error.problems[0].what, error.problems[0].hint
        else:
            how = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
        return cls((rank,), f"failed: {how}", hint, reported=True)

    def as_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Fault:
        return cls(tuple(map(int, message["ranks"])), str(message["what"]), str(message["hint"]),
                   str(message.get("chain", "")), bool(message.get("reported")))
