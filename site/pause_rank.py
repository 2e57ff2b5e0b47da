"""Run a command of vpipe and pause one of its ranks: ``python site/pause_rank.py RANK vpipe train CONFIG``.

The rank's process works for 0.5 s, then stands still for 0.1 s, as it would if something else took its core. It needs
Linux's /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

WORK_S, PAUSE_S = 0.5, 0.1


def process_of(rank: int, launcher: int) -> int | None:
    """Return the process of a rank that a launcher has started; None while there is none."""
    for name in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with suppress(OSError):
            if f"RANK={rank}" in Path(f"/proc/{name}/environ").read_text().split("\0"):
                return int(name)
    return None


def main(rank: int, command: list[str]) -> int:
    """Run the command, pause the rank, and return the command's exit status."""
    with subprocess.Popen(command) as launcher:
        while launcher.poll() is None:
            time.sleep(WORK_S)
            with suppress(OSError):  # it has ended
                if (process := process_of(rank, launcher.pid)) is not None:
                    os.kill(process, signal.SIGSTOP)
                    time.sleep(PAUSE_S)
                    os.kill(process, signal.SIGCONT)
    return launcher.returncode


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        sys.exit("error: no rank, or no command\nhint: python site/pause_rank.py 1 vpipe train CONFIG")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
