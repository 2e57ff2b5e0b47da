"""Waits that last long: told of once when they have, and once when they are over."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from vpipe.watch.chain import chains, sentence
from vpipe.watch.pace import Pace
from vpipe.watch.seen import Seen, duration

MOST_SHOWN = 3
"""Times that long waits are shown, and stacks written down; later ones are a line in the logs."""

MOST_CHAINS = 3
"""At a time, those of most ranks."""

log = logging.getLogger("vpipe")


class Stalls:
    """What one rank says of long waits: to its log, and if it is the first, on the screen.

    The watch's thread must go on beating whatever becomes of a terminal or a disk, so that another one writes.

    Args:
        place: ``rank -> "rank 2 (stage 2) on hostB"``.
        show: a line on the screen; called on rank 0.
    """

    def __init__(self, rank: int, pace: Pace, place: Callable[[int], str], show: Callable[[str], None]) -> None:
        self._rank, self._pace, self._place, self._show = rank, pace, place, show
        self._waiting: tuple[int, float] | None = None  # who waits longest, and for how long
        self._count = 0
        self._writer: Thread | None = None

    def look(self, seen: Sequence[Seen]) -> None:
        """At all ranks, once a beat."""
        longest, waited_s = max(((rank, one.waited_s) for rank, one in enumerate(seen)), key=lambda pair: pair[1])
        if waited_s > self._pace.long_s:
            if self._waiting is None:
                self._begin(seen, waited_s)
            self._waiting = longest, waited_s
        else:
            self._over()

    def end(self) -> None:
        """The rank ends in good order, so whatever it waited for has come; wait until that is written."""
        self._over()
        if self._writer is not None:
            self._writer.join(self._pace.grace_s)

    def _begin(self, seen: Sequence[Seen], waited_s: float) -> None:
        self._count += 1
        found = sorted(chains(seen, self._pace.long_s / 2, self._pace.beat_s), key=lambda chain: -len(chain.ranks))
        told = [";\n  ".join(chain.in_words(self._place)) for chain in found[:MOST_CHAINS]]
        if len(found) > MOST_CHAINS:
            told.append(f"{len(found) - MOST_CHAINS} more: see the logs of the ranks")
        self._write(f"a wait of {duration(waited_s)}, longer than half of timeout_s:\n  " + "\n  ".join(told),
                    stacks=self._count <= MOST_SHOWN, own=sentence(self._rank, seen[self._rank], self._place))

    def _over(self) -> None:
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
    """What every thread of this process is at, into its log, where that is a file."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is not None:
            log.info("the stacks of all threads, the latest call first:")
            handler.flush()
            faulthandler.dump_traceback(handler.stream, all_threads=True)
