"""A rank is killed or stopped, or a cable is cut, on one of three hosts: what all others say, and how soon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, until

HOST_OF = (0, 0, 1, 2)
"""Rank -> host."""

START_S = 240.0


class Run:
    """Four ranks on three hosts, one stage each, that train until one fails."""

    def __init__(self, hosts: Hosts, folder: Path, timeout_s: float) -> None:
        self.hosts = hosts
        self.logs = [folder / f"rank{rank}.log" for rank in range(4)]
        self.processes: list[subprocess.Popen[Any]] = []
        for rank, number in enumerate(HOST_OF):
            environment = {**self.hosts[number].environment(), "RANK": str(rank), "WORLD_SIZE": "4",
                           "MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
                           "GLOO_SOCKET_IFNAME": "eth0"}
            with self.logs[rank].open("wb") as log:
                self.processes.append(self.hosts[number].popen(
                    [sys.executable, Path(__file__).with_name("endless.py"), str(timeout_s)], env=environment,
                    stdout=log, stderr=log))
        self.go_on(START_S)

    def go_on(self, within_s: float = 30.0) -> None:
        """Wait until every rank has made some more steps."""
        steps = [self.step(rank) for rank in range(4)]
        until(lambda: all(self.step(rank) > steps[rank] + 3 for rank in range(4)), within_s,
              "steps: " + "\n".join(log.read_text() for log in self.logs))

    def step(self, rank: int) -> int:
        steps = re.findall(r"^step (\d+)$", self.logs[rank].read_text(), re.MULTILINE)
        return int(steps[-1]) if steps else -1

    def signal(self, rank: int, number: signal.Signals) -> None:
        (process,) = self.hosts[HOST_OF[rank]].find(RANK=str(rank))
        os.kill(process, number)

    def ends(self, ranks: list[int], within_s: float) -> dict[int, str]:
        """What each of the ranks says at its end, which comes in time."""
        started = time.monotonic()
        until(lambda: all(self.processes[rank].poll() is not None for rank in ranks), within_s, "the end of the ranks")
        print(f"\n{time.monotonic() - started:.1f} s of {within_s:g} s")  # shown with -s
        assert [self.processes[rank].returncode for rank in ranks] == [1] * len(ranks)
        return {rank: self.logs[rank].read_text().partition("error: ")[2] for rank in ranks}


@pytest.fixture
def run(hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Parametrized by the timeout in seconds."""
    some = Run(hosts, tmp_path, request.param)
    yield some
    for process in some.processes:
        process.send_signal(signal.SIGCONT)  # nsenter stops with what it runs


@pytest.mark.parametrize("run", [24.0], indirect=True)
def test_five_seconds_without_a_link_are_survived_and_a_killed_rank_ends_all_within_ten(run: Run) -> None:
    run.hosts.cut(run.hosts[1])
    time.sleep(5)
    run.hosts.mend(run.hosts[1])
    run.go_on()
    run.signal(3, signal.SIGKILL)
    for rank, said in run.ends([0, 1, 2], 10).items():
        assert said.startswith(f"rank 3 (stage 3) on host2 died without a message; rank {rank} (stage {rank}) was "), \
            said


@pytest.mark.parametrize("run", [20.0], indirect=True)
def test_a_cut_link_ends_both_sides_within_the_timeout(run: Run) -> None:
    run.hosts.cut(run.hosts[1])
    said = run.ends([0, 1, 2, 3], 20)
    for rank in (0, 1, 3):
        assert re.match(r"rank 2 \(stage 2\) on host1 gave no sign of life for \d+\.?\d* s; ", said[rank]), said[rank]
    assert re.match(r"rank 0 \(stage 0\) on host0 gave no sign of life for \d+\.?\d* s; ", said[2]), said[2]
