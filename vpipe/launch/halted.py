"""Ranks that a signal has stopped (SIGSTOP, a debugger): alive, silent, and nobody but their parent may notice."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from subprocess import Popen

from vpipe.errors import RunError


class Halted:
    """How long which of this process's children have been stopped.

    Several ranks watch one another, and say more; one alone has nobody but its launcher.

    Args:
        most_s: how long a rank may be stopped.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since: dict[int, float] = {}

    def look(self, processes: Mapping[int, Popen[bytes]]) -> RunError | None:
        """What is to be told of one that has been stopped for too long; to be called often.

        Args:
            processes: by rank.
        """
        now = time.monotonic()
        for rank, process in processes.items():
            if not _stopped(process):
                self._since.pop(rank, None)
            elif now - self._since.setdefault(rank, now) > self._most_s:
                return RunError(f"rank {rank} has been stopped for {self._most_s:g} s", rank=rank,
                                hint="a signal (SIGSTOP) or a debugger has stopped its process; a longer pause needs "
                                     "a larger parallel.timeout_s")
        return None


def _stopped(process: Popen[bytes]) -> bool:
    with suppress(ChildProcessError):  # it has ended, and its end was noticed
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False
