"""What torchrun's and SLURM's environments say of a process."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vpipe.distributed.environment import RankEnvironment, alone_hint, slurm_address, slurm_port, starter_id
from vpipe.errors import UserError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "hostA", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none"}
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_NTASKS": "4", "SLURMD_NODENAME": "n1"}
"""A script handed to sbatch, which is no rank itself."""
SRUN = {**BATCH, "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n2"}

Scontrol = Callable[[str], None]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    """A stand-in for SLURM's program, the only one on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(script: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)

    return put


GOOD = """\
case "$2 $3" in
  "hostnames n[1-2]") echo n1; echo n2;;
  "node n1") echo "NodeName=n1 Arch=x86_64"; echo "   NodeAddr=10.0.0.1 NodeHostName=n1 Version=22.05";;
  *) echo "unexpected $*" >&2; exit 1;;
esac"""


@pytest.mark.parametrize("environment", [
    {}, {"SLURM_JOB_ID": "4711"}, BATCH, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, {"WORLD_SIZE": "4"}, {"RANK": "1"}],
    ids=["none", "salloc", "sbatch", "srun-of-one", "no-rank", "no-world"])
def test_alone(environment: dict[str, str]) -> None:
    assert RankEnvironment.parse(environment) is None


def test_a_process_that_may_have_been_meant_to_run_alone_is_told_what_made_it_a_rank(
        scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone_hint({"RANK": "0", "WORLD_SIZE": "2"}).startswith("RANK=0 and WORLD_SIZE=2 make this process a rank")
    assert alone_hint(SRUN).startswith("SLURM_STEP_NUM_TASKS=4 makes this process a rank of 4: to run the process")
    scontrol(GOOD)
    task = RankEnvironment.parse({**SRUN, "SLURM_PTY_PORT": "40123"})  # of a step that a shell of --pty has started
    assert task is not None
    assert alone_hint(SRUN | task.variables) == alone_hint(SRUN)
    assert not alone_hint({}) + alone_hint(TORCHRUN) + alone_hint({**TORCHRUN, RankEnvironment.STARTER: "vpipe train"})
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(UserError, match=r"one of the 4 tasks of srun --pty.*\nhint: SLURM_STEP_NUM_TASKS=4 makes"):
        RankEnvironment.parse({**SRUN, "SLURM_PTY_PORT": "40123"})


def test_several_agents_that_start_ranks_again_must_not_lend_their_store() -> None:
    several = {**TORCHRUN, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with pytest.raises(UserError, match=r"--max-restarts 3\) on 2 hosts.*\n.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        RankEnvironment.parse({**several, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    for mended in ({"TORCHELASTIC_USE_AGENT_STORE": "False"},
                   {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"},
                   {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"}):
        assert RankEnvironment.parse({**several, **mended}) is not None


def test_torchrun() -> None:
    agent = starter_id({}, None)
    assert str(os.getppid()) in agent
    assert RankEnvironment.parse(TORCHRUN) == RankEnvironment("torchrun", 3, 4, 1, socket.gethostname(), "hostA", 29500,
                                                       "none", agent)
    assert RankEnvironment.parse({**SRUN, **TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}) == RankEnvironment(
        "torchrun", 3, 4, 1, "n2", "hostA", 29500, "none", agent, 2)


def test_srun(scontrol: Scontrol) -> None:
    scontrol(GOOD)
    assert RankEnvironment.parse(SRUN) == RankEnvironment("srun", 3, 4, 1, "n2", "10.0.0.1", slurm_port(4711, 2),
                                                          "4711.2", "job 4711.2")
    again = {**SRUN, "SLURM_RESTART_COUNT": "1"}
    requeued = RankEnvironment.parse(again, "head", 1234)
    assert requeued == RankEnvironment("srun", 3, 4, 1, "n2", "head", 1234, "4711.2", "job 4711.2", 1)
    assert requeued is not None
    assert RankEnvironment.parse({**again, **requeued.variables}) == requeued  # in a container
    exported = {**SRUN, "MASTER_ADDR": "other", "MASTER_PORT": "99"}
    assert RankEnvironment.parse(exported) == RankEnvironment("srun", 3, 4, 1, "n2", "other", 99, "4711.2",
                                                     "job 4711.2")


def test_ports_of_jobs_that_run_together_differ() -> None:
    ports = {slurm_port(job, step) for job in range(70_000, 70_500) for step in range(10)}
    assert len(ports) == 5000
    assert min(ports) >= 10_000
    assert max(ports) < 30_000


@pytest.mark.parametrize(("script", "what"), [
    (None, "there is no scontrol on the path, which tells the address of the first rank's node"),
    ("echo no such job >&2; exit 1", "scontrol show hostnames n[1-2] failed: no such job"),
    ("true", "scontrol finds no nodes in 'n[1-2]'"),
    ('[ "$2" = hostnames ] && echo n1; true', "scontrol tells no NodeAddr of node n1"),
])
def test_slurm_that_tells_no_address(scontrol: Scontrol, script: str | None, what: str) -> None:
    if script is not None:
        scontrol(script)
    with pytest.raises(UserError, match=re.escape(what) + "\nhint: set parallel.master_address, or export MASTER_ADDR"):
        slurm_address(SRUN)


@pytest.mark.parametrize(("changes", "what"), [
    ({"MASTER_ADDR": ""}, "torchrun did not set MASTER_ADDR for this process\nhint: start with vpipe"),
    ({"MASTER_PORT": "x"}, "torchrun set MASTER_PORT to 'x'"), ({"RANK": "-1"}, "torchrun set RANK to '-1'")])
def test_an_incomplete_environment(changes: dict[str, str], what: str) -> None:
    with pytest.raises(UserError, match=re.escape(what)):
        RankEnvironment.parse({**TORCHRUN, **changes})


def test_another_number_of_processes(scontrol: Scontrol) -> None:
    scontrol(GOOD)
    member, task = RankEnvironment.parse(TORCHRUN), RankEnvironment.parse(SRUN)
    assert member is not None
    assert task is not None
    member.check(4)
    with pytest.raises(UserError, match="torchrun started 4 processes, but the schedule has 3 ranks\n"
                                        "hint: make --nnodes times --nproc-per-node 3, or change parallel"):
        member.check(3)
    with pytest.raises(UserError, match="srun started 4 processes, but the schedule has 2 ranks\n"
                                        "hint: use srun --ntasks 2, or change parallel"):
        task.check(2)
    with pytest.raises(UserError, match="started 4 processes, but the schedule has 3 ranks, and parallel.tensor splits "
                                        "each over 2: 6\n"
                                        r"hint: make .* 6, or change .*_size or parallel\.tensor"):
        member.check(6, parts=2)
