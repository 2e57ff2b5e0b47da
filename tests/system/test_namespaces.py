"""The hosts are hosts: apart from each other and from this machine, and gone afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts, until

START = """\
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hosts import Hosts
hosts = Hosts(1, Path(sys.argv[2]))
print(hosts[0].first, flush=True)
time.sleep(60)
"""


def ssh(hosts: Hosts, command: str, patience_s: int = 20) -> subprocess.CompletedProcess[str]:
    return hosts[0].run(["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={patience_s}", "host1", command])


def test_three_hosts(hosts: Hosts, tmp_path: Path) -> None:
    assert ssh(hosts, "hostname; cd; pwd").stdout.split() == ["host1", str(hosts[1].home)]
    assert ssh(hosts, f"echo hello > {tmp_path}/own/here; echo $SSH_CONNECTION").stdout.startswith("10.77.0.1 ")
    assert [os.listdir(f"/proc/{host.first}/root{tmp_path}/own") for host in hosts] == [[], ["here"], []]
    assert not list((tmp_path / "own").iterdir())
    assert not {"switch", "host1"} & {name for _, name in socket.if_nameindex()}
    assert socket.gethostname() != "host0"


def test_failures_of_a_host(hosts: Hosts) -> None:
    hosts.cut(hosts[1])
    assert "timed out" in ssh(hosts, "true", 1).stderr
    hosts.mend(hosts[1])
    assert ssh(hosts, "true").returncode == 0
    hosts[1].close_ssh()
    assert "Connection refused" in ssh(hosts, "true").stderr
    hosts[1].open_ssh()
    assert ssh(hosts, "true").returncode == 0
    hosts[1].hide(Path(sys.executable).parents[1])
    assert ssh(hosts, sys.executable).returncode == 127


@pytest.mark.usefixtures("possible")
def test_processes_of_a_host_are_found_and_end_with_it(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "hosts") as hosts:
        hosts[1].popen(["env", "RANK=3", "sleep", "60"])
        until(lambda: len(hosts[1].find(RANK="3")) == 1, 10, "a process")
        [pid] = hosts[1].find(RANK="3")
        assert hosts[1].processes() == {pid: "sleep 60"}
        assert hosts[0].processes() == {}
        os.kill(pid, signal.SIGSTOP)
        around = Path(f"/proc/{hosts[1].started[-1].pid}/stat")  # nsenter
        until(lambda: around.read_text().rpartition(")")[2].split()[0] == "T", 10, "it stops with what it runs")
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("possible")
def test_hosts_end_when_their_test_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", START, Path(__file__).parent, tmp_path / "more"],
                             stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    first = Path("/proc") / owner.stdout.readline().strip()
    assert first.exists()
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    until(lambda: not first.exists(), 10, "the host has ended")
