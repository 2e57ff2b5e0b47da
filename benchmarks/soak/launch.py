"""Launch a run: the processes of one ``vpipe train``, until all of them have gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from long_run import SAVE_EVERY, LongRun
from processes import about, bury, die_with_parent

POLL_S = 0.05


class Launch:
    """``vpipe train`` with some arguments, at work.

    Args:
        long_run: which it works on.
        arguments: after ``vpipe train``.
        others: processes that are not to be waited for here.
    """

    def __init__(self, long_run: LongRun, arguments: Sequence[str], others: Callable[[], set[int]]) -> None:
        self._long_run, self._others = long_run, others
        self.output = long_run.folder / "output.txt"
        self._begins = self.output.stat().st_size if self.output.exists() else 0
        with self.output.open("ab") as file:
            self._launcher = subprocess.Popen([sys.executable, "-m", "vpipe", "train", *arguments], stdout=file,
                                              stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
                                              preexec_fn=die_with_parent)

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return self._launcher.pid

    @property
    def ended(self) -> bool:
        """Whether the launcher has."""
        return self._launcher.poll() is not None

    @property
    def said(self) -> str:
        """What it printed."""
        with self.output.open("rb") as file:
            file.seek(self._begins)
            return file.read().decode(errors="replace")

    def ranks(self) -> dict[int, int]:
        """Rank -> process."""
        return {rank: process.pid for process in about(self._long_run.folder) if (rank := process.rank) is not None}

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Until it holds, the launch ends or the time is over; whether it holds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.ended:
            if condition():
                return True
            time.sleep(POLL_S)
        return False

    def gone(self, limit_s: float) -> tuple[int | None, float]:
        """Wait until the launcher and all ranks have ended.

        Returns:
            Its exit status, negative for the signal that killed it, None when something is still there after
            ``limit_s``; and the seconds that this took.
        """
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            status = self._launcher.poll()
            bury(self._others() | {self.pid})
            if status is not None and not about(self._long_run.folder):
                return status, time.monotonic() - began
            time.sleep(POLL_S)
        return None, time.monotonic() - began


def a_moment(long_run: LongRun, draw: random.Random) -> tuple[str, Callable[[], bool]]:
    """When to strike, in words and as a condition: while starting, at a step, or while a checkpoint is written."""
    kind = draw.choices(["starting", "at", "saving"], [1, 5, 3])[0]
    done = long_run.steps_done()
    if kind == "at":
        step = done + draw.randrange(1, 5 * SAVE_EVERY)
        return f"at step {step}", lambda: long_run.steps_done() >= step
    if kind == "saving":
        # The first save is over by then, so that something is won.
        after = done + draw.randrange(SAVE_EVERY + 1, 3 * SAVE_EVERY)
        # Between two looks a save may come and go: the next one is as good.
        return "while saving", lambda: long_run.steps_done() >= after and long_run.run is not None and any(
            path.name.endswith(".tmp") for path in _listed(long_run.run / "checkpoints"))
    began, after_s = time.monotonic(), draw.uniform(0.2, 6.0)
    return f"{after_s:.1f} s after the start", lambda: time.monotonic() - began > after_s


def strike(pid: int, number: signal.Signals) -> bool:
    """Send a process a signal; whether it was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def damage(checkpoint: Path, draw: random.Random) -> str:
    """Flip a bit of a file of a checkpoint, or cut its end off; says what was done."""
    file = draw.choice(sorted(path for path in checkpoint.iterdir() if path.stat().st_size))
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    if draw.random() < 0.3:
        file.write_bytes(content[:at])
        return f"{checkpoint.name}/{file.name} cut after {at} bytes"
    content[at] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"a bit of byte {at} of {checkpoint.name}/{file.name} flipped"


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []
