"""Follow who waits for whom, and report long waits: a slow rank, a deadlock, a silent or ended process."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

from vpipe.distributed.failure_detector import RankState, WatchdogTiming
from vpipe.distributed.fault import Fault, duration

LONG = 5
"""Length of a chain above which the ranks in its middle are counted, not named."""


@dataclass(frozen=True)
class WaitChain:
    """Ranks of which each waits for the next.

    Attributes:
        states: of all ranks.
        ranks: the first has waited, the last is what all of them wait for.
        circle: from where on they wait for one another, the last for this one; None when they do not.
        silent_s: how long nothing was heard of the last; 0 when it was.
    """

    states: Sequence[RankState]
    ranks: tuple[int, ...]
    circle: int | None = None
    silent_s: float = 0.0

    @classmethod
    def follow(cls, states: Sequence[RankState], first: int, enough_s: float, beat_s: float) -> WaitChain:
        """Follow the waits from a rank on.

        Args:
            enough_s: of a wait, for the others that it may be the reason of. One that began later is work.
            beat_s: between two heartbeats.
        """
        ranks = [first]
        while True:
            last = states[ranks[-1]]
            if last.silent_s > max(2 * beat_s, enough_s / 2) and not last.left:
                return cls(states, tuple(ranks), silent_s=last.silent_s)
            if last.left or last.waits is None or last.waits.peer is None or last.waits.seconds <= enough_s:
                return cls(states, tuple(ranks))
            if last.waits.peer in ranks:
                return cls(states, tuple(ranks), circle=ranks.index(last.waits.peer))
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
        return Fault.left(*self.end) if self.states[self.ranks[-1]].left else Fault.busy(*self.end)

    def sentences(self, place: Callable[[int], str]) -> list[str]:
        """Return a sentence for each rank.

        Args:
            place: ``rank -> "rank 2 (stage 2) on hostB"``.
        """
        sentences = [sentence(rank, self.states[rank], place) for rank in self.ranks]
        last = self.states[self.ranks[-1]]
        if self.silent_s:
            sentences[-1] = (f"{place(self.ranks[-1])} has given no sign of life for {duration(self.silent_s)}: it is "
                             "stopped, or its host is down or cut off")
        elif self.circle is not None:
            sentences[-1] += ": they wait for one another, a deadlock"
        elif not last.left and last.at is not None and not _is_waiting(last):
            sentences[-1] += ": the slow one"
        if len(sentences) > LONG:
            sentences[2:-2] = [f"{len(sentences) - 4} more in between wait in the same way"]
        return sentences


def sentence(rank: int, state: RankState, place: Callable[[int], str]) -> str:
    """Return whom a rank waits for, or else what it does; ``place`` as in :meth:`WaitChain.sentences`."""
    what, seconds = state.at or (None, 0.0)
    if state.waits is not None and _is_waiting(state):
        whom = "all ranks" if state.waits.peer is None else place(state.waits.peer)
        return (f"{place(rank)} has waited {duration(state.waits.seconds)} {state.waits.purpose} {whom}"
                + ("" if what is None else f", while {what}"))
    if state.left:
        return f"{place(rank)} has ended its program"
    if state.at is None:
        return f"{place(rank)} is busy, with nothing for long"
    return f"{place(rank)} has been {what or 'outside of the pipeline, in the program that runs it,'} for " \
        f"{duration(seconds)}"


def _is_waiting(state: RankState) -> bool:
    """Return whether a rank has waited for longer than any transfer takes."""
    return state.waits is not None and state.waits.purpose is not None and not state.left


def chains(states: Sequence[RankState], enough_s: float, beat_s: float) -> list[WaitChain]:
    """Return, for every end that ranks have waited for so long, the chain of most ranks that leads there.

    Args:
        enough_s, beat_s: as in :meth:`WaitChain.follow`.
    """
    longest: dict[tuple[int, ...], WaitChain] = {}
    waiting = [rank for rank, state in enumerate(states) if state.waited_s > enough_s]
    for rank in sorted(waiting, key=lambda rank: -states[rank].waited_s):
        chain = WaitChain.follow(states, rank, enough_s, beat_s)
        end = tuple(sorted(chain.end))
        if end not in longest or len(chain.ranks) > len(longest[end].ranks):
            longest[end] = chain
    return list(longest.values())


MOST_SHOWN = 3
"""Number of long waits that are shown, with stacks written; later ones are a line in the logs."""

MOST_CHAINS = 3
"""Largest number of chains in a report; those of most ranks come first."""

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

    def update(self, states: Sequence[RankState]) -> None:
        """Take in the states of all ranks, once a heartbeat."""
        longest, waited_s = max(((rank, state.waited_s) for rank, state in enumerate(states)), key=lambda pair: pair[1])
        if waited_s <= self.timing.long_s:
            self._end_wait()
            return
        if self._waiting is None:
            self._begin_wait(states, waited_s)
        self._waiting = longest, waited_s

    def end(self) -> None:
        """Report the end of a wait, since the rank ends well; wait until that is written."""
        self._end_wait()
        if self._writer is not None:
            self._writer.join(self.timing.grace_s)

    def _begin_wait(self, states: Sequence[RankState], waited_s: float) -> None:
        self._count += 1
        found = sorted(chains(states, self.timing.long_s / 2, self.timing.beat_s), key=lambda chain: -len(chain.ranks))
        texts = [";\n  ".join(chain.sentences(self._place)) for chain in found[:MOST_CHAINS]]
        if len(found) > MOST_CHAINS:
            texts.append(f"{len(found) - MOST_CHAINS} more: see the logs of the ranks")
        self._write(f"a wait of {duration(waited_s)}, longer than half of timeout_s:\n  " + "\n  ".join(texts),
                    stacks=self._count <= MOST_SHOWN, own=sentence(self._rank, states[self._rank], self._place))

    def _end_wait(self) -> None:
        if self._waiting is not None:
            rank, waited_s = self._waiting
            self._write(f"{self._place(rank)} went on after {duration(waited_s)}")
            self._waiting = None

    def _write(self, text: str, stacks: bool = False, own: str | None = None) -> None:
        shown = self._rank == 0 and self._count <= MOST_SHOWN
        if shown and self._count == MOST_SHOWN and stacks:
            text += "\n  further long waits are written to the logs only"
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
