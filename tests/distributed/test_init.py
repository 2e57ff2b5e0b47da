"""A process group that the program made, and one by srun's environment: used, watched, and left as it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vpipe.app.launch.network import free_port
from vpipe.distributed.rendezvous import server_address
from vpipe.errors import RunError

pytestmark = pytest.mark.usefixtures("forked")

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}


def run(folder: Path, what: str, **environment: str) -> list[tuple[int, list[str], str]]:
    """Exit status, lines and errors of each of two ranks."""
    port = free_port(None)
    said = {**CLEAN, "SECOND_PORT": str(free_port(None))}
    ranks = [subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("own_group.py")), str(rank), str(folder), str(port), what],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={
            **said, **{name: value.format(rank=rank, port=port) for name, value in environment.items()}})
        for rank in range(2)]
    outcomes = [rank.communicate(timeout=60) for rank in ranks]
    return [(rank.returncode, out.splitlines(), err) for rank, (out, err) in zip(ranks, outcomes, strict=True)]


@pytest.mark.parametrize(("store", "hosts", "reached", "listens"), [
    ("127.0.0.1", "aa", "", "127.0.0.1"), ("127.0.0.1", "ab", "", ""),  # others may know this host by another name
    ("10.255.255.1", "aa", "127.0.0.1", "127.0.0.1"), ("", "aa", "127.0.0.1", "127.0.0.1")])
def test_rank_0_is_reached_as_the_store_on_its_host_is(store: str, hosts: str, reached: str, listens: str) -> None:
    """As the store is, where that is on rank 0's host; empty stands for that, or for all addresses to listen at."""
    assert server_address(store, hosts) == (reached, listens)


def test_other_hosts_reach_rank_0_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert server_address("", ["a", "b"]) == ("localhost", "")
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setattr("vpipe.distributed.network.socket.gethostbyname", lambda name: {"a": "10.0.0.1"}[name])
    assert server_address("", ["a", "b"]) == ("10.0.0.1", "")

    def unknown(name: str) -> str:
        raise OSError

    monkeypatch.setattr("vpipe.distributed.network.socket.gethostbyname", unknown)
    with pytest.raises(RunError, match=r"no address of this host is found(.|\n)*hint: export MASTER_ADDR"):
        server_address("", ["a", "b"])


def test_groups_that_the_program_made_are_watched(tmp_path: Path) -> None:
    """Over each store, of each backend; a rank that dies outside of any transfer ends the others within seconds."""
    (first, lines, err), (second, others, _) = run(tmp_path, "groups")
    assert lines == others, (lines, others, err)
    assert [line.split(" ", 1)[1] for line in lines[:3]] == [lines[0].split(" ", 1)[1]] * 3, "the same losses"
    assert lines[3].endswith(", mine between ranks")
    assert (first, second) == (1, 7), err
    assert "error: rank 1 died without a message; rank 0 was at work (rank 0, peer rank 1)\n" in err


def test_a_group_of_vpipes_that_the_program_destroyed_is_made_again(tmp_path: Path) -> None:
    (first, lines, err), (second, others, _) = run(
        tmp_path, "again", RANK="{rank}", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    assert (first, second, err) == (0, 0, "")
    assert lines == others == lines[:1] * 2


def test_ranks_of_srun_need_no_launcher(tmp_path: Path) -> None:
    (first, lines, err), (second, others, _) = run(
        tmp_path, "srun", SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="{rank}",
        SLURM_LOCALID="{rank}", SLURMD_NODENAME="n1", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    assert (first, second) == (0, 0), err
    assert [line.split()[-2:] for line in (lines[0], others[0])] == [["0", "cpu:gloo,cuda:gloo"],
                                                                     ["1", "cpu:gloo,cuda:gloo"]]
    assert lines[0].split()[:3] == others[0].split()[:3]


def test_ranks_with_a_gpu_each_have_nccl_for_them_and_gloo_for_the_host(tmp_path: Path) -> None:
    for rank, (status, lines, err) in enumerate(run(tmp_path, "gpus")):
        assert (status, err) == (0, "")
        assert lines == ["computing on cuda:0, cuda:1 (made up), nccl between ranks",
                         f"cuda:{rank} ['cpu:gloo,cuda:nccl', 10.0, False]"]


def test_ranks_that_share_a_gpu_are_refused_nccl_and_take_gloo_unasked(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    host = socket.gethostname()
    for rank, (status, lines, err) in enumerate(run(tmp_path / "shared", "gpus")):
        assert status == 0, err
        assert lines[0] == f"error: backend nccl needs a GPU per rank, but ranks 0, 1 on {host} share cuda:0"
        assert lines[1].startswith("hint: use backend: gloo, under which ranks may share a GPU, start fewer ranks, or ")
        assert lines[2:] == [f"cuda:{rank}", "computing on cuda:0, cuda:1 (made up), gloo between ranks",
                             f"cuda:{rank} ['gloo', 10.0, False]"]
        assert err == ("" if rank else "gloo carries tensors between ranks, not nccl: ranks 0, 1 on "
                       f"{host} share cuda:0\n")
