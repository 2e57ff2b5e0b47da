"""Starting the ranks of a run on this host, and ending them together with those of other hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from vpipe.errors import VpipeError
from vpipe.launch.failure import first_failure
from vpipe.launch.folder import log_path
from vpipe.launch.network import held
from vpipe.launch.ranks import HostRanks
from vpipe.launch.variables import PARENT_PIPE

GRACE_S = 2.0
"""After a failure: for the other ranks to say what they saw, then again for them to end."""

POLL_S = 0.05


class Interrupted(Exception):  # noqa: N818 - it is no error, as KeyboardInterrupt is none
    """Ctrl-C or a request to end (SIGTERM)."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class Elsewhere(Protocol):
    """The ranks of another host, as the launcher of this one sees them."""

    def start(self, folder: Path) -> None:
        """Start them; what they write comes into ``folder``."""

    @property
    def statuses(self) -> Mapping[int, int | None]:
        """As :attr:`Processes.statuses`."""

    @property
    def lost(self) -> VpipeError | None:
        """Why the host is out of reach, when it is."""

    def close(self) -> None:
        """End them; wait until they have ended and all that they wrote is here, or the host is lost."""


class Processes:
    """The ranks of this host. When this process dies, they end by themselves.

    Args:
        ranks: which.
        folder: the run's folder, which tells them everything.
    """

    def __init__(self, ranks: HostRanks, folder: Path) -> None:
        self._ranks, self.folder = ranks, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._reader, self._writer = os.pipe()

    def start(self, ranks: Iterable[int] | None = None) -> None:
        """Start them all, or some."""
        for rank in self._ranks.devices if ranks is None else ranks:
            self._processes[rank] = self._start(rank)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        # The pipe is standard input, which every program hands on to what it wraps. A session of its own keeps
        # Ctrl-C from a rank: the launcher ends it.
        environment = {**os.environ, **self._ranks.environment(rank), PARENT_PIPE: "0"}
        command = self._ranks.command(self.folder)
        # Rank 0 shows progress and the summary on the terminal; what others print goes to their logs.
        if rank == 0:
            return subprocess.Popen(command, env=environment, start_new_session=True, stdin=self._reader)
        with log_path(self.folder, rank).open("ab") as output:
            return subprocess.Popen(command, env=environment, start_new_session=True, stdin=self._reader,
                                    stdout=output, stderr=output)

    @property
    def statuses(self) -> Mapping[int, int | None]:
        """Per rank its exit status, negative for the signal that killed it; None while it runs."""
        return {rank: _status(process) for rank, process in self._processes.items()}

    def close(self) -> None:
        """End what still runs, with all it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes.values():
                if _status(process) is None:
                    _signal_group(process, number)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and None in self.statuses.values():
                time.sleep(0.02)
        for process in self._processes.values():
            process.wait()
        for end in (self._reader, self._writer):
            os.close(end)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status of a rank, None while it runs; what it started and left behind is killed."""
    ended_before = process.returncode is not None
    if process.poll() is not None and not ended_before:
        _signal_group(process, signal.SIGKILL)  # the number of a group is not given anew while it has members
    return process.returncode


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # there is none, or on some systems only the dead
        os.killpg(process.pid, number)


def close_all(groups: Sequence[Processes | Elsewhere]) -> None:
    """End all of them, at the same time: a host that is lost is given up after seconds only."""
    with ThreadPoolExecutor(max(1, len(groups))) as pool:
        list(pool.map(lambda group: group.close(), groups))


def run_ranks(here: HostRanks, folder: Path, describe: Callable[[int], str],
              elsewhere: Sequence[Elsewhere] = ()) -> None:
    """Run one process per rank, here and on other hosts, until all have ended.

    The first failure ends all of them. Ctrl-C and SIGTERM do, too.

    Args:
        describe: ``rank -> "rank 2 (stage 2)"``.
        elsewhere: the ranks of other hosts, which are ready to start.

    Raises:
        VpipeError: a rank failed.
        Interrupted: by a signal.
    """
    with interrupting() as ignore_signals, held(here.port):
        mine = Processes(here, folder)
        groups: list[Processes | Elsewhere] = [mine, *elsewhere]
        try:
            mine.start()
            for other in elsewhere:
                other.start(folder)
            while True:
                statuses = _statuses(groups)
                if any(statuses.values()) or any(other.lost for other in elsewhere):
                    raise _failure(groups, elsewhere, folder, describe)
                if None not in statuses.values():
                    return
                time.sleep(POLL_S)
        finally:
            ignore_signals()  # a second Ctrl-C must not leave ranks behind
            close_all(groups)


@contextmanager
def interrupting() -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM raise :class:`Interrupted`; what it gives, when called, has them ignored from then on."""
    handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}

    def ignore() -> None:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield ignore
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _failure(groups: Sequence[Processes | Elsewhere], elsewhere: Sequence[Elsewhere], folder: Path,
             describe: Callable[[int], str]) -> VpipeError:
    """What is told of a failure, once the other ranks had time to say what they saw."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and None in _statuses(groups).values():
        time.sleep(POLL_S)
    lost = [other.lost for other in elsewhere if other.lost is not None]
    return first_failure(_statuses(groups), lost, folder, describe)


def _statuses(groups: Sequence[Processes | Elsewhere]) -> dict[int, int | None]:
    return {rank: status for group in groups for rank, status in group.statuses.items()}
