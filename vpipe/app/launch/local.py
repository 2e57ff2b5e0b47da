"""Start the ranks of this host, wait for all ranks, and end them together with those of other hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from time import monotonic
from types import FrameType
from typing import Any, Protocol

from vpipe.app.errors import LastingError
from vpipe.app.launch.failure_report import End, find_failure, read_report, read_reports
from vpipe.app.launch.network import held
from vpipe.app.launch.rank_env import HostRanks
from vpipe.app.progress import on_terminal
from vpipe.app.signals import PARENT_PIPE, STOPS, UNSAVED, status_after
from vpipe.app.train.run_folder import RUNNING, log_path
from vpipe.distributed import Fault, RankEnvironment
from vpipe.errors import RunError, VpipeError, counted

GRACE_S = 2.0
"""Time after a failure for the other ranks to report what they saw, then again for them to end."""

LEAVE_S = 30.0
"""Time for the other ranks to end, once the first has after a signal to one of them: all has been saved by then."""

STATUS_S = 10.0
"""Time for the exit status of a rank that others found dead to come."""

POLL_S = 0.05

ENDED = (*(-number for number in STOPS), *(base + number for base in (128, UNSAVED) for number in STOPS))
"""Exit statuses of a rank that one of these signals ended."""


class Interrupted(Exception):  # noqa: N818 - it is no error, as KeyboardInterrupt is none
    """Ctrl-C, or another of :data:`~vpipe.app.signals.STOPS`.

    Args:
        number: of the signal.
        saved: whether the ranks stopped by themselves, and the state after their last step is in a checkpoint.
    """

    def __init__(self, number: int, *, saved: bool = False) -> None:
        self.number, self.saved = number, saved
        super().__init__(signal.Signals(number).name)

    @property
    def exit_status(self) -> int:
        """See :func:`~vpipe.app.signals.status_after`."""
        return status_after(self.number, saved=self.saved)


class RemoteRanks(Protocol):
    """The ranks of another host, as the launcher of this one sees them."""

    def start(self, folder: Path) -> None:
        """Start them; what they write is copied into ``folder``."""

    @property
    def statuses(self) -> Mapping[int, int | None]:
        """As :attr:`Processes.statuses`. Raises RunError where what they write cannot be kept here."""

    @property
    def lost(self) -> Mapping[int, End]:
        """The ends of ranks that were lost with their host."""

    def stop(self, number: int) -> None:
        """As :meth:`Processes.stop`."""

    def close(self) -> None:
        """End them; wait until they have ended and all that they wrote is here, or the host is lost."""


class Processes:
    """The ranks of this host, ``by_rank``. When this process dies, they end by themselves.

    Args:
        folder: the run's, which has their config.
    """

    def __init__(self, ranks: HostRanks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self.by_rank: dict[int, Popen[bytes]] = {}
        self._pipes: dict[int, int] = {}  # to each of them

    def start(self) -> None:
        """Start them all; they inherit the limit of file descriptors."""
        RankEnvironment.reserve_descriptors(self._ranks.devices, self._ranks.world)
        for rank in self._ranks.devices:
            reader, self._pipes[rank] = os.pipe()
            try:
                self.by_rank[rank] = self._start(rank, reader)
            finally:
                os.close(reader)

    def _start(self, rank: int, pipe: int) -> Popen[bytes]:
        # The pipe is standard input, which every program hands on to what it wraps. A session of its own keeps
        # Ctrl-C from a rank: the launcher ends it.
        environment = {**os.environ, **self._ranks.environment(rank), PARENT_PIPE: "0"}
        command = self._ranks.command(self._folder)
        # Rank 0 shows progress and the summary on the terminal; what others print goes to their logs.
        with nullcontext() if rank == 0 else log_path(self._folder, rank).open("ab") as output:
            return subprocess.Popen(command, env=environment, start_new_session=True, stdin=pipe,
                                    stdout=output, stderr=output)

    @property
    def statuses(self) -> Mapping[int, int | None]:
        """Per rank its exit status, negative for the signal that killed it; None while it runs."""
        return {rank: _status(process) for rank, process in self.by_rank.items()}

    def stop(self, number: int) -> None:
        """Ask them to stop and save, as if each had got this signal."""
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError):  # it has ended
                os.write(pipe, bytes([number]))

    def close(self) -> None:
        """End what still runs, with all it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.by_rank.values():
                if _status(process) is None:
                    _signal_group(process, number)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and None in self.statuses.values():
                time.sleep(0.02)
        for process in self.by_rank.values():
            process.wait()
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()


def _status(process: Popen[bytes]) -> int | None:
    """Return the exit status of a rank, None while it runs; what it started and left behind is killed."""
    ended_before = process.returncode is not None
    if process.poll() is not None and not ended_before:
        _signal_group(process, signal.SIGKILL)  # the number of a group is not reused while it has members
    return process.returncode


def _signal_group(process: Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # there is none, or on some systems only the dead
        os.killpg(process.pid, number)


def close_all(groups: Sequence[Processes | RemoteRanks]) -> None:
    """End all of them, at the same time: a host that is lost is given up after seconds only."""
    with ThreadPoolExecutor(max(1, len(groups))) as pool:
        list(pool.map(lambda group: group.close(), groups))


def run_ranks(here: HostRanks, folder: Path, describe: Callable[[int], str],
              elsewhere: Sequence[RemoteRanks] = (), stop_s: float = 0.0,
              waiting: Callable[[], None] = lambda: None, stopped_ranks: StoppedRanks | None = None) -> None:
    """Run one process per rank, here and on other hosts, until all have ended.

    The first failure ends all of them. A signal (Ctrl-C, SIGTERM, SIGUSR1) asks them to stop: after the same step, once
    they have saved. A second one, or the end of ``stop_s``, ends them as they are.

    Args:
        describe: ``rank -> "rank 2 (stage 2)"``.
        elsewhere: the ranks of other hosts, which are ready to start.
        stop_s: how long they may take to stop; 0 where there is nothing to save: they are ended at once.
        waiting: called often while they run.
        stopped_ranks: notices ranks that SIGSTOP has stopped.

    Raises:
        LastingError: a rank failed when it was asked to stop: no other attempt is wanted then.
        VpipeError: a rank failed.
        Interrupted: by a signal, to this process or to a rank.
    """
    with Signals(passed_on=stop_s > 0) as signals, held(here.port), _meeting(elsewhere) as meeting:
        mine = Processes(replace(here, meeting=meeting), folder)
        groups: list[Processes | RemoteRanks] = [mine, *elsewhere]
        try:
            mine.start()
            for other in elsewhere:
                other.start(folder)
            while _go_on(groups, signals, stop_s, folder):
                if any(other.lost for other in elsewhere) or _failed(_statuses(groups), folder, bool(signals.first)):
                    failure = _failure(groups, elsewhere, folder, describe)
                    if signals.first is not None and isinstance(failure, RunError):
                        frames, failure = failure.frames, LastingError(failure.located, hint=failure.hint)
                        failure.frames = frames
                    raise failure
                if stopped_ranks is not None and (stopped := stopped_ranks.update(mine.by_rank)) is not None:
                    raise RunError(stopped.sentence(describe), hint=stopped.hint)
                waiting()
                time.sleep(POLL_S)
        finally:
            signals.ignore()  # another Ctrl-C must not leave ranks behind
            close_all(groups)


@contextmanager
def _meeting(elsewhere: Sequence[RemoteRanks]) -> Iterator[str | None]:
    """Make the folder where the ranks meet, which only this user may enter; None where some are on other hosts."""
    if elsewhere:
        yield None
        return
    # The path of a socket in it may have some 100 bytes.
    parent = None if len(os.fsencode(tempfile.gettempdir())) < 80 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="vpipe-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield folder


def _go_on(groups: Sequence[Processes | RemoteRanks], signals: Signals, stop_s: float, folder: Path) -> bool:
    """Return whether to wait for the ranks; pass a signal on."""
    statuses = _statuses(groups)
    if signals.first is None:
        return None in statuses.values() or any(statuses.values())
    if signals.passed_at is None:
        signals.passed_at = time.monotonic()
        over = "\r\x1b[K" if on_terminal() else ""  # the bar of rank 0, which it draws again below
        print(f"{over}{signals.first.name}: the ranks save and end, within {stop_s:g} s; a second one ends them at "
              "once", file=sys.stderr, flush=True)
        for group in groups:
            group.stop(signals.first)
    if None not in statuses.values() and not _failed(statuses, folder, asked=True):
        if not any(statuses.values()):
            return False  # it was at its end
        stopped = _stopped(statuses)
        raise Interrupted(signals.first, saved=stopped is not None and stopped.saved)
    if time.monotonic() - signals.passed_at > stop_s:
        raise Interrupted(signals.first)
    return True


class Signals:
    """SIGINT, SIGTERM and SIGUSR1 to this process, as a context: they raise :class:`Interrupted`.

    Args:
        passed_on: whether the first one is only noted, in ``first``, to be passed on at ``passed_at``.
    """

    def __init__(self, *, passed_on: bool) -> None:
        self._passed_on = passed_on
        self._before: dict[int, Any] = {}
        self.first: signal.Signals | None = None
        self.passed_at: float | None = None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._handle) for number in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._passed_on or self.first is not None:
            raise Interrupted(number)
        self.first = signal.Signals(number)

    def ignore(self) -> None:
        """Ignore these signals until the context ends."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)


def _failed(statuses: Mapping[int, int | None], folder: Path, asked: bool) -> bool:
    """Return whether a rank has failed.

    Args:
        asked: whether all were asked to stop: then it is no failure to be ended by that before the training, nor to
            lose a rank that was.
    """
    bad = [rank for rank, status in statuses.items() if status]
    if not asked:
        return bool(bad)
    reports = {rank: read_report(folder, rank) for rank in bad if statuses[rank] not in ENDED}
    return any(report is None or not report.blames for report in reports.values())


def _stopped(statuses: Mapping[int, int | None]) -> Interrupted | None:
    """Return the signal after which all ranks stop, from the first rank's status, once it has one."""
    if any(status for rank, status in statuses.items() if rank != 0):
        return None
    for base in (128, UNSAVED):
        if (number := (statuses.get(0) or 0) - base) in STOPS:
            return Interrupted(number, saved=base == 128)
    return None


def _failure(groups: Sequence[Processes | RemoteRanks], elsewhere: Sequence[RemoteRanks], folder: Path,
             describe: Callable[[int], str]) -> VpipeError | Interrupted:
    """Return the failure of the run, once the other ranks had time to report what they saw, and it is known how those
    ended that they found dead; or the signal to a rank for which all stopped.
    """
    began, statuses = time.monotonic(), _statuses(groups)
    while None in statuses.values() and time.monotonic() - began < (
            LEAVE_S if _stopped(statuses) else STATUS_S if _dying(statuses, folder) else GRACE_S):
        time.sleep(POLL_S)
        statuses = _statuses(groups)
    stopped = None if None in statuses.values() else _stopped(statuses)
    if stopped is not None:
        return stopped
    ends = {rank: End.with_status(status) for rank, status in statuses.items() if status}
    for other in elsewhere:
        ends |= other.lost
    failure = find_failure(folder, describe, ends)
    assert failure is not None, "else no rank has failed"
    return failure


def _dying(statuses: Mapping[int, int | None], folder: Path) -> bool:
    """Return whether other ranks found one dead whose exit status has yet to come: a system may take long to end it."""
    faults = [report.fault for report in read_reports(folder) if report.fault is not None]
    return any(statuses.get(rank, 0) is None for fault in faults if fault.is_death for rank in fault.ranks)


def _statuses(groups: Sequence[Processes | RemoteRanks]) -> dict[int, int | None]:
    return {rank: status for group in groups for rank, status in group.statuses.items()}


class StoppedRanks:
    """Notice child processes that SIGSTOP or a debugger has stopped for longer than ``most_s``.

    Several ranks watch one another, and report more; one alone has nobody but its launcher.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._stopped_since: dict[int, float] = {}

    def update(self, processes: Mapping[int, Popen[bytes]]) -> Fault | None:
        """Return the fault of a rank that has been stopped for too long; to be called often."""
        now = time.monotonic()
        for rank, process in processes.items():
            if not _is_stopped(process):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > self._most_s:
                return Fault.silent(self._most_s, rank).knowing("stopped by a signal (SIGSTOP) or a debugger")
        return None


def _is_stopped(process: Popen[bytes]) -> bool:
    with suppress(ChildProcessError):  # it has ended, and its end was noticed
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


SLOW_S, AGAIN_S = 2.0, 10.0
"""When a start is first shown, and how often again."""


class StartNotice:
    """Print that the ranks of a run start, until they have met: then the first one locks the run."""

    def __init__(self, folder: Path, ranks: int, checkpoint: Path | None) -> None:
        self._file = folder / RUNNING
        self._before = self._locked_at()  # by an attempt that was killed
        self._began, self._next_s, self._over = monotonic(), SLOW_S, False
        self._what = f"starting {counted(ranks, 'rank')}" + ("" if checkpoint is None else f", from {checkpoint.name}")

    def update(self) -> None:
        """Print the line, if it is time; to be called often."""
        seconds = monotonic() - self._began
        # Asked every time: a short run may end, and remove the file, before the next line is due.
        self._over = self._over or self._locked_at() != self._before
        if not self._over and seconds >= self._next_s:
            print(self._what + ("" if self._next_s == SLOW_S else f": {seconds:.0f} s"), file=sys.stderr, flush=True)
            self._next_s += AGAIN_S

    def _locked_at(self) -> int:
        with suppress(FileNotFoundError):
            return self._file.stat().st_mtime_ns
        return 0
