"""``machines``: one command on the first of three hosts runs a rank or two on each, over ssh."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hosts import VPIPE, Host, Hosts, until
from small_run import check_updates, job_of, losses, only_run, oracle, write_config

MACHINES = ["host0:0", "host0:1", "host1:0", "host2:0"]
SIZES = {"parallel__model_parallel_size": 4, "training__max_steps": 3}


def config(folder: Path, hosts: Hosts, machines: list[str] = MACHINES, **changes: object) -> Path:
    """A small config; its runs go to a folder of which each host has one of its own."""
    path = write_config(folder, **SIZES | changes)
    path.write_text(f"machines: {machines}\n" + path.read_text().replace(f"{folder}/runs", f"{folder}/own"))
    return path


def left(hosts: Hosts) -> list[str]:
    """Processes and temporary files of ours on any host."""
    return [f"{host.name}: {thing}" for host in hosts
            for thing in (*host.processes().values(), *(host.home / "tmp").glob("vpipe*"))]


def own(host: Host, folder: Path) -> Path:
    return host.path(folder / "own")


class Launched:
    """A long run, started on host0, with a rank for each of the machines."""

    def __init__(self, folder: Path, hosts: Hosts, machines: list[str]) -> None:
        self.hosts, self.folder = hosts, folder
        path = config(folder, hosts, machines, parallel__model_parallel_size=len(machines), training__max_steps=None,
                      training__max_minutes=2.0)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = hosts[0].popen([VPIPE, "train", path], cwd=folder, stdout=out, stderr=err)
        until(lambda: len(list(own(hosts[0], folder).glob("*/metrics.jsonl"))) == 1, 240, "training")
        self.run = only_run(own(hosts[0], folder))
        until(lambda: (self.run / "metrics.jsonl").read_text().count("\n") > 3, 60, "a few updates")

    @property
    def launcher(self) -> int:
        """Its process id, outside."""
        words = f"{VPIPE} train"
        return min(pid for pid, line in self.hosts[0].processes().items() if words in line)

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def ends(self, seconds: float) -> int:
        """The exit status, once nothing is left on any host."""
        status = self.process.wait(seconds)
        until(lambda: not left(self.hosts), seconds, f"nothing is left, such as {left(self.hosts)}")
        assert "Traceback" not in self.err
        return status


def test_a_run(hosts: Hosts, tmp_path: Path) -> None:
    """With the losses of one device; what ranks wrote on other hosts is in the folder of the first."""
    path = config(tmp_path, hosts)
    done = hosts[0].run([VPIPE, "train", path], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    run = only_run(own(hosts[0], tmp_path))
    check_updates(run, 3)
    assert losses(run) == oracle(job_of(tmp_path, **SIZES), 3).losses
    for rank in range(4):
        log = (run / f"rank{rank}.log").read_text()
        assert f"stages [{rank}]" in log
        assert f"rank {rank} has ended" in log
    assert done.stdout.splitlines()[0] == done.stdout.splitlines()[-1] == f"run folder: {tmp_path}/own/{run.name}"
    assert left(hosts) == []
    assert not [path for host in hosts[1:] for path in own(host, tmp_path).iterdir()]


def refused(hosts: Hosts, tmp_path: Path) -> str:
    done = hosts[0].run([VPIPE, "train", config(tmp_path, hosts)], cwd=tmp_path, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert left(hosts) == []
    assert not list(own(hosts[0], tmp_path).iterdir())
    return done.stderr


def test_ssh_is_refused_and_a_host_has_no_vpipe(hosts: Hosts, tmp_path: Path) -> None:
    hosts[1].close_ssh()
    hosts[2].hide(Path(sys.executable).parents[1])
    said = refused(hosts, tmp_path)
    assert "error: host host1 cannot be reached: ssh: connect to host host1 port 22: Connection refused" in said
    assert "error: host host2 has no Python at " in said
    assert said.count("hint: ") == 2


def test_a_host_is_out_of_reach_and_another_lets_no_key_in(hosts: Hosts, tmp_path: Path) -> None:
    hosts.cut(hosts[1])
    hosts[2].bar()
    said = refused(hosts, tmp_path)
    assert "error: host host1 cannot be reached: ssh: connect to host host1 port 22: " in said
    assert "error: host host2 does not let ssh in: " in said
    assert "ssh-copy-id" in said


def test_ctrl_c_ends_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """In good order: the ranks of all hosts are told, and end well."""
    launched = Launched(tmp_path, hosts, ["host0:0", "host1:0"])  # on two: each rank takes seconds to start
    os.kill(launched.launcher, signal.SIGINT)
    assert launched.ends(30) == 130
    assert launched.err.splitlines()[-1] == "interrupted (SIGINT): all ranks have ended"
    assert re.search(r"^SIGINT: the ranks save and end, within \d+ s; a second one ends them at once$", launched.err,
                     re.M)
    assert all(f"rank {rank} has ended" in (launched.run / f"rank{rank}.log").read_text() for rank in range(2))


@pytest.mark.timeout(600)  # of a busy machine
def test_it_goes_on_without_a_host_that_stays_away(hosts: Hosts, tmp_path: Path) -> None:
    """The stages are cut anew for the ranks that are left; the losses stay those of one device."""
    changes = {"parallel__model_parallel_size": 3, "training__max_steps": 60, "checkpoint__every_steps": 5,
               "checkpoint__directory": str(tmp_path / "checkpoints")}
    path = config(tmp_path, hosts, ["host0:0", "host1:0", "host2:0"], **changes)
    path.write_text(path.read_text() + "elastic: true\n")
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = hosts[0].popen([VPIPE, "train", path, "--restarts", "2"], cwd=tmp_path, stdout=out, stderr=err)
    until(lambda: bool(list(tmp_path.glob("checkpoints/*/step-5"))), 240, "a checkpoint")
    hosts[2].close_ssh()
    os.kill(hosts[2].find(RANK="2")[0], signal.SIGKILL)
    status, said = process.wait(240), (tmp_path / "err").read_text()
    assert status == 0, said
    assert re.search(r"^attempt 2 of 3: rank 2 \(stage 2\) on host2 died without a message, killed by signal 9 "
                     r"\(SIGKILL\); .*; going on from step \d+$", said, re.M)
    assert "elastic: going on without a host: host host2 cannot be reached: ssh: connect to host host2 port 22" in said
    assert "Traceback" not in said
    run = only_run(own(hosts[0], tmp_path))
    check_updates(run, 60)
    assert losses(run) == oracle(job_of(tmp_path, **SIZES | changes), 60).losses
    assert left(hosts) == []
