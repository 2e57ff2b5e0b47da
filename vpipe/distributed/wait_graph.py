"""Follow who waits for whom, and report long waits: a slow rank, a deadlock, a silent or ended process."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, Protocol

from vpipe.distributed.fault import Fault, WatchdogTiming, duration


class Transfer(Protocol):
    """A transfer that the main thread is in.

    Its ``str`` is ``waiting for the loss of step 3 from stage 1 with rank 2``.
    """

    @property
    def peer(self) -> int | None:
        """The other rank; None when all take part."""

    @property
    def said(self) -> str:
        """The words between "has waited 31 s" and the other rank: ``for the loss of step 3 from stage 1 from``."""

    @property
    def limit_s(self) -> float | None:
        """Seconds after which the watchdog gives it up, for transfers without a timeout of their own: nccl waits
        without end for the peer with which it makes a communicator."""


@dataclass(frozen=True)
class Wait:
    """A wait for another rank, or for all (None); ``said`` as in :class:`Transfer`, None while it is new."""

    peer: int | None
    seconds: float
    said: str | None = None


@dataclass(frozen=True)
class RankState:
    """The state of a rank as the others know it, at most a beat old.

    Attributes:
        silent_s: since it was heard.
        left: whether it ended in good order.
        waits: for whom.
        at: what it is at, and for how long; None when that changed a moment ago.
    """

    silent_s: float = 0.0
    left: bool = False
    waits: Wait | None = None
    at: tuple[str | None, float] | None = None

    @property
    def waited_s(self) -> float:
        """Seconds for which it has waited; 0 for a rank that left."""
        return 0.0 if self.waits is None or self.left else self.waits.seconds

    @property
    def is_waiting(self) -> bool:
        """Whether it has waited for longer than any transfer takes."""
        return self.waits is not None and self.waits.said is not None and not self.left

    def __str__(self) -> str:
        """Return the predicate of a sentence on what it does."""
        if self.left:
            return "has ended its program"
        if self.at is None:
            return "is at work, at nothing for long"
        what, seconds = self.at
        where = f"{what} for" if what is not None else "outside of the pipeline, in the program that runs it, for"
        return f"has been {where} {duration(seconds)}"

    @classmethod
    def parse(cls, silent_s: float, left: bool, waits: Sequence[Any] | None, at: Sequence[Any] | None) -> RankState:
        """Return the state in a message of the server."""
        return cls(silent_s, left, None if waits is None else Wait(*waits), None if at is None else (at[0], at[1]))


LONG = 5
"""Ranks, above which those in the middle of a chain are counted, not named."""


@dataclass(frozen=True)
class WaitChain:
    """Ranks of which each waits for the next.

    Attributes:
        ranks: the first has waited, the last is what all of them wait for.
        circle: from where on they wait for one another, the last for this one; None when they do not.
        silent_s: how long nothing was heard of the last; 0 when it was.
    """

    seen: Sequence[RankState]
    ranks: tuple[int, ...]
    circle: int | None = None
    silent_s: float = 0.0

    @classmethod
    def follow(cls, seen: Sequence[RankState], first: int, enough_s: float, beat_s: float) -> WaitChain:
        """Follow the waits from a rank on.

        Args:
            enough_s: of a wait, for the others that it may be the reason of. One that began later is work.
            beat_s: between two signs of life.
        """
        ranks = [first]
        while True:
            last = seen[ranks[-1]]
            if last.silent_s > max(2 * beat_s, enough_s / 2) and not last.left:
                return cls(seen, tuple(ranks), silent_s=last.silent_s)
            if last.left or last.waits is None or last.waits.peer is None or last.waits.seconds <= enough_s:
                return cls(seen, tuple(ranks))
            if last.waits.peer in ranks:
                return cls(seen, tuple(ranks), circle=ranks.index(last.waits.peer))
            ranks.append(last.waits.peer)

    @property
    def end(self) -> tuple[int, ...]:
        """The rank, or the circle of ranks, that the others wait for."""
        return self.ranks[-1:] if self.circle is None else self.ranks[self.circle:]

    @property
    def fault(self) -> Fault:
        """The fault to report when the first rank can wait no longer."""
        if self.circle is not None:
            return Fault.circle(*self.end)
        if self.silent_s:
            return Fault.silent(self.silent_s, *self.end)
        return Fault.left(*self.end) if self.seen[self.ranks[-1]].left else Fault.busy(*self.end)

    def sentences(self, place: Callable[[int], str]) -> list[str]:
        """Return a sentence for each rank.

        Args:
            place: ``rank -> "rank 2 (stage 2) on hostB"``.
        """
        sentences = [self._sentence(number, place) for number in range(len(self.ranks))]
        if len(sentences) > LONG:
            sentences[2:-2] = [f"{len(sentences) - 4} more in between wait in the same way"]
        return sentences

    def _sentence(self, number: int, place: Callable[[int], str]) -> str:
        rank, is_last = self.ranks[number], number == len(self.ranks) - 1
        seen = self.seen[rank]
        if is_last and self.silent_s:
            silence = f"has given no sign of life for {duration(self.silent_s)}"
            return f"{place(rank)} {silence}: it is stopped, or its host is down or cut off"
        if is_last and self.circle is not None:
            return f"{sentence(rank, seen, place)}: they wait for one another, a deadlock"
        slow = is_last and not seen.left and seen.at is not None and not seen.is_waiting
        return sentence(rank, seen, place) + (": the slow one" if slow else "")


def sentence(rank: int, seen: RankState, place: Callable[[int], str]) -> str:
    """Return whom a rank waits for, or else what it does; ``place`` as in :meth:`WaitChain.sentences`."""
    if seen.waits is None or not seen.is_waiting:
        return f"{place(rank)} {seen}"
    whom = "all ranks" if seen.waits.peer is None else place(seen.waits.peer)
    what = "" if seen.at is None or seen.at[0] is None else f", while {seen.at[0]}"
    return f"{place(rank)} has waited {duration(seen.waits.seconds)} {seen.waits.said} {whom}{what}"


def chains(seen: Sequence[RankState], enough_s: float, beat_s: float) -> list[WaitChain]:
    """Return, for every end that ranks have waited for so long, the chain of most ranks that leads there.

    Args:
        enough_s, beat_s: as in :meth:`WaitChain.follow`.
    """
    longest: dict[tuple[int, ...], WaitChain] = {}
    waiting = [rank for rank, one in enumerate(seen) if one.waited_s > enough_s]
    for rank in sorted(waiting, key=lambda rank: -seen[rank].waited_s):
        chain = WaitChain.follow(seen, rank, enough_s, beat_s)
        end = tuple(sorted(chain.end))
        if end not in longest or len(chain.ranks) > len(longest[end].ranks):
            longest[end] = chain
    return list(longest.values())


MOST_SHOWN = 3
"""Times that long waits are shown, and stacks written down; later ones are a line in the logs."""

MOST_CHAINS = 3
"""At a time, those of most ranks."""

log = logging.getLogger("vpipe")


class LongWaits:
    """Report long waits: in the log of a rank, and on the screen if it is rank 0.

    The watchdog's thread must go on beating whatever becomes of a terminal or a disk, so that another one writes.

    Args:
        place: ``rank -> "rank 2 (stage 2) on hostB"``.
        show: a line on the screen; called on rank 0.
    """

    def __init__(self, rank: int, timing: WatchdogTiming, place: Callable[[int], str],
                 show: Callable[[str], None]) -> None:
        self._rank, self.timing, self._place, self._show = rank, timing, place, show
        self._waiting: tuple[int, float] | None = None  # who waits longest, and for how long
        self._count = 0
        self._writer: Thread | None = None

    def update(self, seen: Sequence[RankState]) -> None:
        """Take in the states of all ranks, once a beat."""
        longest, waited_s = max(((rank, one.waited_s) for rank, one in enumerate(seen)), key=lambda pair: pair[1])
        if waited_s > self.timing.long_s:
            if self._waiting is None:
                self._begin(seen, waited_s)
            self._waiting = longest, waited_s
        else:
            self._end_wait()

    def end(self) -> None:
        """Report the end of a wait, since the rank ends in good order; wait until that is written."""
        self._end_wait()
        if self._writer is not None:
            self._writer.join(self.timing.grace_s)

    def _begin(self, seen: Sequence[RankState], waited_s: float) -> None:
        self._count += 1
        found = sorted(chains(seen, self.timing.long_s / 2, self.timing.beat_s), key=lambda chain: -len(chain.ranks))
        told = [";\n  ".join(chain.sentences(self._place)) for chain in found[:MOST_CHAINS]]
        if len(found) > MOST_CHAINS:
            told.append(f"{len(found) - MOST_CHAINS} more: see the logs of the ranks")
        self._write(f"a wait of {duration(waited_s)}, longer than half of timeout_s:\n  " + "\n  ".join(told),
                    stacks=self._count <= MOST_SHOWN, own=sentence(self._rank, seen[self._rank], self._place))

    def _end_wait(self) -> None:
        if self._waiting is not None:
            rank, waited_s = self._waiting
            self._write(f"{self._place(rank)} went on after {duration(waited_s)}", stacks=False)
            self._waiting = None

    def _write(self, text: str, stacks: bool, own: str | None = None) -> None:
        shown = self._rank == 0 and self._count <= MOST_SHOWN
        if shown and self._count == MOST_SHOWN and stacks:
            text += "\n  further long waits are told of in the logs only"
        before = self._writer

        def write() -> None:
            if before is not None:
                before.join()
            with suppress(Exception):  # a closed terminal, a full disk
                log.info(text)
                if own is not None:
                    log.info("here: %s", own)
                if stacks:
                    _write_stacks()
            if shown:
                with suppress(Exception):
                    self._show(text)

        self._writer = Thread(target=write, name="vpipe-watch-writer", daemon=True)
        self._writer.start()


def _write_stacks() -> None:
    """Write the stacks of all threads of this process into its log, if that is a file."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is not None:
            log.info("the stacks of all threads, the latest call first:")
            handler.flush()
            faulthandler.dump_traceback(handler.stream, all_threads=True)
