"""Processes that joined gloo once and carry out one job after the other, so that a test costs no start."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import getfile
from pathlib import Path
from typing import Any

import pytest
from fork_server import Popen
from rank_process import REPLIES

JOB_S = 60.0
"""A job takes a second; this long means that it hangs."""


@dataclass
class Process:
    """One rank, seen from the test."""

    popen: subprocess.Popen[bytes]
    replies: int
    log: Path
    unread: bytes = b""
    said: list[tuple[str, Any]] = field(default_factory=list)


class SilenceError(AssertionError):
    """A rank did not say in time what the test waits for."""


class World:
    """Ranks that are started when the first job comes, and anew after a job that failed."""

    def __init__(self, ranks: int, folder: Path, *, gloo_timeout_s: float = 50.0,
                 program: Path | None = None) -> None:
        self.ranks, self._folder, self._gloo_timeout_s = ranks, folder, gloo_timeout_s
        self._program = program or Path(__file__).with_name("rank_process.py")
        self.processes: list[Process] = []
        self._starts = 0

    def run(self, job: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What the job returned on every rank; the test fails with all that the ranks said when one raised or hangs.

        Transfers are in an unknown state after an error, so the next job gets a fresh world.
        """
        self.begin(job, **arguments)
        outcomes: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + JOB_S
        while len(outcomes) < self.ranks and time.monotonic() < deadline:
            for rank in set(range(self.ranks)) - set(outcomes):
                with suppress(SilenceError):
                    outcomes[rank] = self.outcome(rank, 0.01)
                    if outcomes[rank][0] == "error":  # the others wait for it now, but may have errors of their own
                        deadline = min(deadline, time.monotonic() + 1)
        if [kind for kind, _ in outcomes.values()] != ["result"] * self.ranks:
            said = [f"rank {rank}: {value['traceback'] if kind == 'error' else value}"
                    for rank, (kind, value) in sorted(outcomes.items())]
            pytest.fail("\n".join([*said, *self._logs()]))
        return [outcomes[rank][1] for rank in range(self.ranks)]

    def begin(self, job: Callable[..., Any], **arguments: Any) -> None:
        """Hand a job to every rank."""
        if not self.processes:
            self._start()
        line = json.dumps([str(Path(getfile(job)).parent), job.__module__, job.__name__, arguments]) + "\n"
        for process in self.processes:
            process.popen.stdin.write(line.encode())
            process.popen.stdin.flush()

    def outcome(self, rank: int, within_s: float) -> tuple[str, Any]:
        """How the job ended on a rank."""
        return self._wait(rank, within_s, lambda kind, value: kind != "progress")

    def progress(self, rank: int, wanted: Callable[[Any], bool], within_s: float) -> None:
        """Wait until a rank tells of progress that is wanted."""
        self._wait(rank, within_s, lambda kind, value: kind != "progress" or wanted(value))

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        self.processes[rank].popen.send_signal(number)

    def close(self) -> list[int]:
        """Let all ranks end; their exit statuses. One that does not end is killed."""
        for process in self.processes:
            with suppress(BrokenPipeError):
                process.popen.stdin.close()
        statuses = []
        for process in self.processes:
            try:
                statuses.append(process.popen.wait(20))
            except subprocess.TimeoutExpired:
                statuses.append(-signal.SIGKILL)
        self.kill()
        return statuses

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.popen.kill()  # also ends one that was stopped
            process.popen.wait(20)
            with suppress(BrokenPipeError):
                process.popen.stdin.close()
            os.close(process.replies)
        self.processes = []

    def _start(self) -> None:
        self._starts += 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.ranks):
            reader, writer = os.pipe()
            log = self._folder / f"start{self._starts}_rank{rank}.log"
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                           "GLOO_SOCKET_IFNAME": "lo",
                           "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2])),
                           REPLIES: str(writer), "VPIPE_TEST_TIMEOUT_S": str(self._gloo_timeout_s)}
            with log.open("wb") as output:
                popen = Popen([sys.executable, self._program], env=environment,
                              pass_fds=[writer], stdin=subprocess.PIPE, stdout=output, stderr=output)
            os.close(writer)
            self.processes.append(Process(popen, reader, log))
        for rank in range(self.ranks):
            try:
                assert self.outcome(rank, JOB_S) == ("result", self.ranks)
            except SilenceError as silence:
                pytest.fail("\n".join([str(silence), *self._logs()]))

    def _wait(self, rank: int, within_s: float, wanted: Callable[[str, Any], bool]) -> tuple[str, Any]:
        deadline = time.monotonic() + within_s
        process = self.processes[rank]
        while True:
            while process.said:
                kind, value = process.said.pop(0)
                if wanted(kind, value):
                    return kind, value
            if not self._read(process, deadline - time.monotonic()):
                raise SilenceError(f"rank {rank} did not answer within {within_s:g} s, or ended")

    def _read(self, process: Process, within_s: float) -> bool:
        """More of what a rank says; False when it says nothing, or has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(process.replies, selectors.EVENT_READ)
            if not selector.select(max(0.0, within_s)):
                return False
        more = os.read(process.replies, 65536)
        *lines, process.unread = (process.unread + more).split(b"\n")
        process.said += [tuple(json.loads(line)) for line in lines]
        return bool(more)

    def _logs(self) -> list[str]:
        """What every rank printed, with the stack of each that still runs; ends all of them."""
        statuses = [process.popen.poll() for process in self.processes]
        for process in self.processes:
            process.popen.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        logs = [process.log for process in self.processes]
        self.kill()
        return [f"== {log.name}, exit status {status}\n{log.read_text(errors='replace')}"
                for log, status in zip(logs, statuses, strict=True)]
