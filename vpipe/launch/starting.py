"""What a launcher says while its ranks start, which is silent work: they read torch from disk, and meet."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic

from vpipe.errors import counted
from vpipe.launch.folder import RUNNING

SLOW_S, AGAIN_S = 2.0, 10.0
"""From when on it is said, and how often."""


class Starting:
    """Tells of the ranks of a run until they have met, when the first one takes the run.

    Args:
        folder: of the run.
        ranks: on all hosts.
        checkpoint: the one to go on from, if any.
    """

    def __init__(self, folder: Path, ranks: int, checkpoint: Path | None) -> None:
        self._file = folder / RUNNING
        self._before = self._taken_at()  # by an attempt that was killed
        self._began, self._next_s, self._over = monotonic(), SLOW_S, False
        self._what = f"starting {counted(ranks, 'rank')}" + ("" if checkpoint is None else f", from {checkpoint.name}")

    def look(self) -> None:
        """Say it, if it is time; to be called often."""
        seconds = monotonic() - self._began
        # Looked at every time: a short run has ended, and let go of the file, before the next line is due.
        self._over = self._over or self._taken_at() != self._before
        if not self._over and seconds >= self._next_s:
            so_far = "" if self._next_s == SLOW_S else f": {seconds:.0f} s"
            print(self._what + so_far, file=sys.stderr, flush=True)
            self._next_s += AGAIN_S

    def _taken_at(self) -> int:
        with suppress(FileNotFoundError):
            return self._file.stat().st_mtime_ns
        return 0
