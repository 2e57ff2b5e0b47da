"""Starting the ranks of a run on this machine, and ending them together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from vpipe.errors import RunError, UserError, VpipeError
from vpipe.launch.folder import failure_path, log_path

GRACE_S = 2.0
"""After a failure: for the other ranks to say what they saw, then again for them to end."""

PARENT_PIPE = "VPIPE_PARENT_PIPE"
"""Environment variable with a file descriptor: it ends when the launcher does, and then so must the rank."""


class Interrupted(Exception):  # noqa: N818 - it is no error, as KeyboardInterrupt is none
    """Ctrl-C or a request to end (SIGTERM)."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def free_port(wanted: int | None) -> int:
    """The port where ranks meet: the one asked for, or a free one.

    Raises:
        UserError: the port asked for is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: a port in TIME_WAIT will do
        try:
            probe.bind(("", wanted or 0))  # on all interfaces, where the store listens
        except OSError as error:
            raise UserError(f"port {wanted} cannot be used: {error.strerror}",
                            hint="set parallel.master_port to a free port, or leave it out to have one found") from None
        return int(probe.getsockname()[1])


def run_ranks(ranks: int, folder: Path, *, port: int, threads: int, describe: Callable[[int], str],
              task: Sequence[str] = ("train",)) -> None:
    """Run one process per rank until all have ended.

    The first failure ends all of them. Ctrl-C and SIGTERM do, too. When this process dies, they end by
    themselves.

    Args:
        folder: the run's folder, which tells the ranks everything.
        describe: ``rank -> "rank 2 (stage 2)"``.
        task: what the ranks do; see :mod:`vpipe.launch.worker`.

    Raises:
        VpipeError: a rank failed.
        Interrupted: by a signal.
    """
    reader, writer = os.pipe()
    processes: dict[int, subprocess.Popen[bytes]] = {}
    handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(ranks):
            processes[rank] = _start(rank, ranks, folder, port, threads, reader, task)
        while any(process.poll() is None for process in processes.values()):
            if any(process.poll() for process in processes.values()):
                raise _failure(processes, folder, describe)
            time.sleep(0.05)
        if any(process.returncode for process in processes.values()):
            raise _failure(processes, folder, describe)
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave ranks behind
        _end(processes)
        os.close(reader)
        os.close(writer)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _start(rank: int, ranks: int, folder: Path, port: int, threads: int, parent_pipe: int,
           task: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
        PARENT_PIPE: str(parent_pipe)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the name of this host resolves to
    command = [sys.executable, "-m", "vpipe.launch.worker", str(folder), *task]
    # Rank 0 shows progress and the summary on the terminal; what others print goes to their logs. A session of
    # its own keeps Ctrl-C from a rank: the launcher ends it.
    if rank == 0:
        return subprocess.Popen(command, env=environment, pass_fds=[parent_pipe], start_new_session=True,
                                stdin=subprocess.DEVNULL)
    with log_path(folder, rank).open("ab") as output:
        return subprocess.Popen(command, env=environment, pass_fds=[parent_pipe], start_new_session=True,
                                stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _failure(processes: Mapping[int, subprocess.Popen[bytes]], folder: Path,
             describe: Callable[[int], str]) -> VpipeError:
    """The failure that came first in cause: what a rank says of itself goes before what others say of it."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes.values()):
        time.sleep(0.05)
    said = sorted((report for rank in processes if (report := _read(failure_path(folder, rank))) is not None),
                  key=lambda report: (report["blames_peer"], report["time"]))
    if said and not said[0]["blames_peer"]:
        return _as_error(said[0], describe)
    for rank, process in processes.items():
        if process.poll() and not failure_path(folder, rank).exists():
            code = process.returncode
            how = (f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0
                   else f"ended with exit status {code}")
            hint = f"its log: {log_path(folder, rank)}"
            if code == -signal.SIGKILL:
                hint = f"Linux kills a process so when memory runs out; {hint}"
            return RunError(f"{describe(rank)} {how}", hint=hint)
    return _as_error(said[0], describe)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        report = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return report if isinstance(report, dict) else None


def _as_error(report: Mapping[str, Any], describe: Callable[[int], str]) -> RunError:
    what, hint, where = report["problems"][0]
    if report["user"]:  # what the user could mend before the run was found before: by now the run has failed
        what = f"{describe(report['rank'])}: {what}" + (f" ({where})" if where else "")
    return RunError(what, hint=hint)


def _end(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """End what still runs, with all it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in processes.values()):
            time.sleep(0.02)
    for process in processes.values():
        process.wait()
