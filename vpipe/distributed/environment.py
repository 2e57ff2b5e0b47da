"""Read from the environment which rank of a job this process is: torchrun's, srun's or our own variables."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vpipe.errors import UserError

PARENT_PIPE = "VPIPE_PARENT_PIPE"
"""A file descriptor: it ends when the launcher does, and then so must the rank. A byte in it is the number of a signal
that the launcher passes on: unlike a signal it loses none that comes while Python starts, and reaches nothing else."""

HOST = "VPIPE_HOST"
"""The host's name for messages, where a run has several."""

RUN = "VPIPE_RUN"
"""What tells the run from others that might use its port."""

STARTER = "VPIPE_STARTER"
"""The program that started the ranks, for one that starts itself anew in a container."""

AGENT = "VPIPE_AGENT"
"""What would start this process again after a failure, for one that starts itself anew in a container."""


FIRST_PORT, PORTS = 10_000, 20_000
"""A job's port is one of these: below those that Linux gives to connections."""

_COUNTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "srun": "SLURM_RESTART_COUNT"}
"""Where a starter says how often it has started the ranks again."""


@dataclass(frozen=True)
class RankEnvironment:
    """One rank of a run that another program started.

    Attributes:
        starter: that program.
        rank, ranks: which, of how many.
        device: its number on its host.
        host: the name of its host.
        address, port: where rank 0 waits for the others, or torchrun does.
        run: what tells the run from others that might use the port; empty where its starter does not say.
        agent: what would start it again; empty where nothing does.
        restarts: how often that has happened, as its starter says.
    """

    starter: str
    rank: int
    ranks: int
    device: int
    host: str
    address: str
    port: int
    run: str = ""
    agent: str = ""
    restarts: int = 0

    @classmethod
    def parse(cls, environment: Mapping[str, str], address: str | None = None,
              port: int | None = None) -> RankEnvironment | None:
        """Return the rank that the environment describes; None for a process that was started alone.

        ``RANK`` and ``WORLD_SIZE`` are torchrun's. Under SLURM only the processes of ``srun`` are ranks: in a batch
        script itself there is no step, and an interactive step has one task.

        Args:
            address, port: where the ranks of srun meet, if the config says it.

        Raises:
            UserError: the environment is incomplete, or SLURM does not tell an address.
        """
        host = environment.get(HOST) or environment.get("SLURMD_NODENAME") or socket.gethostname()
        if "RANK" in environment and "WORLD_SIZE" in environment:
            starter = environment.get(STARTER) or ("torchrun" if "TORCHELASTIC_RUN_ID" in environment else
                                                   "its starter")
            if starter == "torchrun":
                _check_store(environment)
            rank = _number(environment, "RANK", starter)
            device = _number(environment, "LOCAL_RANK", starter) if "LOCAL_RANK" in environment else rank
            return cls(starter, rank, _number(environment, "WORLD_SIZE", starter), device, host,
                       _text(environment, "MASTER_ADDR", starter), _number(environment, "MASTER_PORT", starter),
                       environment.get(RUN) or environment.get("TORCHELASTIC_RUN_ID", ""),
                       starter_id(environment, None) if starter in _COUNTS else "", _restarts(environment, starter))
        if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
            return None
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
        ranks = _number(environment, tasks, "srun")
        if ranks == 1:
            return None
        job, step = _number(environment, "SLURM_JOB_ID", "srun"), _number(environment, "SLURM_STEP_ID", "srun")
        if port is None:
            port = _number(environment, "MASTER_PORT", "srun") if "MASTER_PORT" in environment else \
                slurm_port(job, step)
        return cls("srun", _number(environment, "SLURM_PROCID", "srun"), ranks,
                   _number(environment, "SLURM_LOCALID", "srun"), host,
                   address or environment.get("MASTER_ADDR") or slurm_address(environment), port,
                   f"{job}.{step}", starter_id(environment, f"{job}.{step}"), _restarts(environment, "srun"))

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of this process should say, as torchrun says it, and what it cannot."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(self.device),
                "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port),
                RUN: self.run, STARTER: self.starter, AGENT: self.agent}

    def check(self, ranks: int) -> None:
        """Refuse another number of processes than the schedule has ranks.

        Raises:
            UserError: it is another.
        """
        if self.ranks == ranks:
            return
        remedy = {"torchrun": f"make --nnodes times --nproc-per-node {ranks}", "srun": f"use srun --ntasks {ranks}"}
        raise UserError(f"{self.starter} started {self.ranks} process{'es' * (self.ranks > 1)}, but the schedule has "
                        f"{ranks} rank{'s' * (ranks > 1)}",
                        hint=remedy.get(self.starter, f"start {ranks}") + ", or change parallel.model_parallel_size")


def local_rank() -> int | None:
    """Return the number of this process among those of its host; None where the environment does not say it.

    Raises:
        UserError: the environment says something that is no number.
    """
    for name, starter in (("LOCAL_RANK", "the environment"), ("SLURM_LOCALID", "srun")):
        if name in os.environ and (starter != "srun" or "SLURM_STEP_ID" in os.environ):
            return _number(os.environ, name, starter)
    return None


def rank_or_0() -> int:
    """Return the rank that the environment says, or 0.

    Raises:
        UserError: it is no number.
    """
    return _number(os.environ, "RANK", "the environment") if "RANK" in os.environ else 0


def _check_store(environment: Mapping[str, str]) -> None:
    """Refuse what makes ranks wait for the dead: the store of one of several agents keeps what those said.

    One agent alone counts the restarts for all its ranks, so theirs have names of their own; of several each counts
    only the failures of its own ranks.
    """
    agents, restarts = (int(environment.get(name) or 0) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if agents > 1 and restarts and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(f"torchrun is to start the ranks again (--max-restarts {restarts}) on {agents} hosts, but lets "
                        "them use its own store, which keeps the notes of dead ranks",
                        hint="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host, or leave --max-restarts out")


def slurm_port(job: int, step: int) -> int:
    """Return the port of a step of a job, the same on all its nodes.

    Of 2000 jobs in a row, each with up to ten steps, no two have the same. Others may, as jobs that export MASTER_PORT
    may: a rank that finds another run at its port says so.
    """
    return FIRST_PORT + (10 * job + step) % PORTS


def slurm_address(environment: Mapping[str, str]) -> str:
    """Return the address of the node of a step's first rank, as SLURM knows it.

    Raises:
        UserError: SLURM does not say.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("srun does not tell the nodes of the step: SLURM_STEP_NODELIST is not set", hint=_REMEDY)
    names = _scontrol("hostnames", nodes).split()
    if not names:
        raise UserError(f"scontrol finds no nodes in '{nodes}'", hint=_REMEDY)
    for word in _scontrol("node", names[0]).split():
        key, _, value = word.partition("=")
        if key == "NodeAddr" and value:
            return value
    raise UserError(f"scontrol tells no NodeAddr of node {names[0]}", hint=_REMEDY)


_REMEDY = "set parallel.master_address, or export MASTER_ADDR, to the name of the first rank's node"


def _scontrol(*question: str) -> str:
    try:
        return subprocess.run(["scontrol", "show", *question], capture_output=True, text=True, check=True,
                              timeout=60).stdout
    except FileNotFoundError:
        raise UserError("there is no scontrol on the path, which tells the address of the first rank's node",
                        hint=_REMEDY) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = getattr(error, "stderr", None) or ""
        raise UserError(f"scontrol show {' '.join(question)} failed: {str(said).strip() or error}", hint=_REMEDY) \
            from None


def _restarts(environment: Mapping[str, str], starter: str) -> int:
    name = _COUNTS.get(starter)
    return _number(environment, name, starter) if name is not None and name in environment else 0


def _text(environment: Mapping[str, str], name: str, starter: str) -> str:
    if not environment.get(name):
        raise UserError(f"{starter} did not set {name} for this process",
                        hint="start with vpipe train, torchrun or srun; unset RANK and WORLD_SIZE where none of them "
                        "set them")
    return environment[name]


def _number(environment: Mapping[str, str], name: str, starter: str) -> int:
    text = _text(environment, name, starter)
    if not text.isdecimal():
        raise UserError(f"{starter} set {name} to '{text}'", hint="it must be a whole number")
    return int(text)


def starter_id(environment: Mapping[str, str], job_step: str | None) -> str:
    """Return what starts this process, and would start it again.

    Under torchrun it is the parent, torchrun's agent on this host, with its start, since numbers of processes come
    again (where the system tells it: Linux). Under srun it is the step of the job, which keeps its numbers when the
    job is requeued.

    Args:
        job_step: SLURM's numbers of both.
    """
    if AGENT in environment:
        return environment[AGENT]  # of the process that started itself anew in a container
    if job_step is not None:
        return f"{environment.get('SLURM_CLUSTER_NAME', '')} job {job_step}".strip()
    parent, began = os.getppid(), ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {parent} on {socket.gethostname()} since {began}"
