"""The processes that a soak starts, directly or not: which there are, what they hold, and that none is left.

Linux only: this process adopts whatever its descendants leave behind, so that none of them can hide.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Process:
    """A process: its number, its parent's, its command line, and whether it has ended and waits to be noticed."""

    pid: int
    parent: int
    command: str
    ended: bool

    @property
    def rank(self) -> int | None:
        """Its rank, if it is one."""
        if "vpipe.app.launch.rank_main" not in self.command:
            return None
        with suppress(OSError):
            for entry in Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    return int(entry[5:])
        return None


@dataclass(frozen=True)
class Held:
    """What a process holds: resident memory, open handles (files, sockets, pipes), threads."""

    rss_bytes: int
    handles: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held | None:
        """Of a process; None when it has gone."""
        with suppress(OSError, StopIteration):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            return cls(int(status["VmRSS"].split()[0]) * 1024, len(os.listdir(f"/proc/{pid}/fd")),
                       int(status["Threads"]))
        return None


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies.

    Raises:
        SystemExit: the system cannot do that.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}: the soak needs Linux")


def die_with_parent() -> None:
    """Have the system kill this process when the one that started it dies, however it does."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def take_one_core() -> int:
    """Have this process and all it starts share one core; returns its number."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def descendants() -> list[Process]:
    """All of them, this process left out."""
    everyone = {process.pid: process for process in _all()}
    found: list[Process] = []
    wanted = {os.getpid()}
    while True:
        generation = [process for process in everyone.values() if process.parent in wanted]
        if not generation:
            return found
        found += generation
        wanted = {process.pid for process in generation}


def about(folder: Path) -> list[Process]:
    """The descendants that are still at work and whose command line names a folder."""
    return [process for process in descendants() if str(folder) in process.command and not process.ended]


def bury(others: set[int]) -> None:
    """Take notice of adopted descendants that have ended; those in ``others`` have somebody who does."""
    for process in descendants():
        if process.ended and process.parent == os.getpid() and process.pid not in others:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def end_all() -> int:
    """Kill every descendant; returns how many there were."""
    count = 0
    deadline = time.monotonic() + 20
    while (alive := [p for p in descendants() if not p.ended]) and time.monotonic() < deadline:
        count = max(count, len(alive))
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        bury(set())
        time.sleep(0.05)
    return count


def _all() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                # After the name, which may hold anything, come the state and the parent.
                state, parent, *_ = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield Process(int(entry), int(parent), command, state == "Z")
