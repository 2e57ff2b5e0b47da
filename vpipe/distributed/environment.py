"""Read from the environment which rank of a job this process is: torchrun's, srun's or our own variables.

Have as many file descriptors as the ranks need, or say how many that is.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vpipe.errors import RunError, UserError

FIRST_PORT, PORTS = 10_000, 20_000
"""A job's port is one of these: below those that Linux gives to connections."""

_COUNTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "srun": "SLURM_RESTART_COUNT"}
"""How often a starter has started the ranks again."""

SPARE = 16
"""Descriptors for files that a rank opens while it trains: data, logs, checkpoints, modules that are imported late."""

AT_START = 8
"""Descriptors that a rank has when its launcher has started it, before it joins the others."""

ENOUGH = 1 << 16
"""Largest limit that is asked for, even where the hard limit is higher."""


@dataclass(frozen=True)
class RankEnvironment:
    """One rank of a run that another program started.

    The names in capitals are those of vpipe's own variables:

    - ``HOST``: the host's name for messages, where a run has several.
    - ``RUN``: an identity of the run; others might use its port.
    - ``SECRET``: what only the ranks of a run know, by which they let each other in. vpipe's launcher makes one for
      each run; under torchrun and srun a user may set one. It is in no store, no command line, no log and no file.
    - ``MEETING``: the folder where the ranks of a run on one host meet; nobody else can enter it.
    - ``STARTER``, ``AGENT``: the program that started the ranks, and :func:`starter_id`, for a process that replaces
      itself in a container.

    Attributes:
        starter: that program.
        rank, ranks: which, of how many.
        device: its number on its host.
        host: the name of its host.
        address, port: where rank 0 waits for the others, or torchrun does.
        run: an identity of the run, since others might use the port; empty if unknown.
        agent: see :func:`starter_id`; empty where nothing would start it again.
        restarts: how often that has happened.
    """

    HOST: ClassVar = "VPIPE_HOST"
    RUN: ClassVar = "VPIPE_RUN"
    SECRET: ClassVar = "VPIPE_SECRET"
    MEETING: ClassVar = "VPIPE_MEETING"
    STARTER: ClassVar = "VPIPE_STARTER"
    AGENT: ClassVar = "VPIPE_AGENT"

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
        host = environment.get(cls.HOST) or environment.get("SLURMD_NODENAME") or socket.gethostname()
        if "RANK" in environment and "WORLD_SIZE" in environment:
            starter = environment.get(cls.STARTER) or ("torchrun" if "TORCHELASTIC_RUN_ID" in environment else
                                                   "its starter")
            if starter == "torchrun":
                _check_store(environment)
            rank = read_number(environment, "RANK", starter)
            device = read_number(environment, "LOCAL_RANK", starter) if "LOCAL_RANK" in environment else rank
            return cls(starter, rank, read_number(environment, "WORLD_SIZE", starter), device, host,
                       read_text(environment, "MASTER_ADDR", starter), read_number(environment, "MASTER_PORT", starter),
                       environment.get(cls.RUN) or environment.get("TORCHELASTIC_RUN_ID", ""),
                       starter_id(environment, None) if starter in _COUNTS else "", _restarts(environment, starter))
        if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
            return None
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
        ranks = read_number(environment, tasks, "srun")
        if ranks == 1:
            return None
        if "SLURM_PTY_PORT" in environment and sys.stdin is not None and sys.stdin.isatty():
            raise UserError(f"this shell is one of the {ranks} tasks of srun --pty, and the other tasks have ended",
                            hint=alone_hint(environment))
        job, step = read_number(environment, "SLURM_JOB_ID", "srun"), read_number(environment, "SLURM_STEP_ID", "srun")
        if port is None:
            port = read_number(environment, "MASTER_PORT", "srun") if "MASTER_PORT" in environment else \
                slurm_port(job, step)
        return cls("srun", read_number(environment, "SLURM_PROCID", "srun"), ranks,
                   read_number(environment, "SLURM_LOCALID", "srun"), host,
                   address or environment.get("MASTER_ADDR") or slurm_address(environment), port,
                   f"{job}.{step}", starter_id(environment, f"{job}.{step}"), _restarts(environment, "srun"))

    @staticmethod
    def local_rank() -> int | None:
        """Return the number of this process among those of its host; None if the environment lacks it."""
        for name, starter in (("LOCAL_RANK", "the environment"), ("SLURM_LOCALID", "srun")):
            if name in os.environ and (starter != "srun" or "SLURM_STEP_ID" in os.environ):
                return read_number(os.environ, name, starter)
        return None

    @property
    def variables(self) -> dict[str, str]:
        """The environment of this process, with torchrun's names and vpipe's own."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(self.device),
                "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port),
                self.RUN: self.run, self.STARTER: self.starter, self.AGENT: self.agent}

    @staticmethod
    def reserve_descriptors(here: Collection[int], ranks: int) -> None:
        """Raise this process's limit of file descriptors, which the ranks that it starts ``here`` inherit.

        Args:
            ranks: on all hosts.

        Raises:
            UserError: the hard limit is too low.
        """
        each = AT_START + max(joining(rank, ranks) for rank in here)
        reserve(max(open_files() + len(here), each) + SPARE, f"each of {ranks} ranks, and what starts them, needs")

    def check(self, ranks: int, parts: int = 1) -> None:
        """Refuse another number of processes than the schedule has ranks, each of ``parts`` that split its layers."""
        if self.ranks == ranks:
            return
        remedy = {"torchrun": f"make --nnodes times --nproc-per-node {ranks}", "srun": f"use srun --ntasks {ranks}"}
        raise UserError(f"{self.starter} started {self.ranks} process{'es' * (self.ranks > 1)}, but the schedule has "
                        f"{ranks // parts} rank{'s' * (ranks > parts)}"
                        + (f", and parallel.tensor splits each over {parts}: {ranks}" if parts > 1 else ""),
                        hint=remedy.get(self.starter, f"start {ranks}") + ", or change parallel.model_parallel_size"
                        + " or parallel.tensor" * (parts > 1))


def _check_store(environment: Mapping[str, str]) -> None:
    """Refuse a store in one of several agents: it keeps the entries of dead ranks, and new ranks would wait for those.

    One agent alone counts the restarts of all ranks, so that each attempt has names of its own; of several agents each
    counts only the failures of its own ranks.
    """
    agents, restarts = (int(environment.get(name) or 0) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if agents > 1 and restarts and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(f"torchrun is to start the ranks again (--max-restarts {restarts}) on {agents} hosts, but lets "
                        "them use its own store, which keeps the notes of dead ranks",
                        hint="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host, or leave --max-restarts out")


def slurm_port(job: int, step: int) -> int:
    """Return the port of a step of a job, the same on all its nodes.

    Of 2000 jobs in a row, each with up to ten steps, no two have the same; a rank that finds another run at its port
    ends with an error.
    """
    return FIRST_PORT + (10 * job + step) % PORTS


def slurm_address(environment: Mapping[str, str]) -> str:
    """Return the address of the node of a step's first rank. Raises UserError if SLURM does not tell it."""
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
                        hint=f"{_REMEDY}; {alone_hint(os.environ)}") from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        printed = str(getattr(error, "stderr", None) or "").strip()
        raise UserError(f"scontrol show {' '.join(question)} failed: {printed or error}", hint=_REMEDY) from None


def alone_hint(environment: Mapping[str, str]) -> str:
    """Return which variables made this process a rank, and how it runs alone; empty where it is a rank for certain."""
    starter = environment.get(RankEnvironment.STARTER, "its starter")
    if starter == "srun" or ("SLURM_STEP_ID" in environment and "RANK" not in environment):
        tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS")
        return (f"SLURM_STEP_NUM_TASKS={tasks} makes this process a rank of {tasks}: to run the process alone, unset "
                "SLURM_STEP_ID, or ask for a shell with srun --ntasks 1 --pty")
    if starter != "its starter" or "TORCHELASTIC_RUN_ID" in environment or "RANK" not in environment:
        return ""
    rank, ranks = environment["RANK"], environment["WORLD_SIZE"]
    return (f"RANK={rank} and WORLD_SIZE={ranks} make this process a rank of {ranks}: to run the process alone, unset "
            "both; if they count hosts, start with torchrun")


def _restarts(environment: Mapping[str, str], starter: str) -> int:
    name = _COUNTS.get(starter, "")
    return read_number(environment, name, starter) if name in environment else 0


def read_text(environment: Mapping[str, str], name: str, starter: str) -> str:
    """Return a variable. Raises UserError, naming the starter, if it is not set."""
    if not environment.get(name):
        if starter == "the environment":
            raise UserError(f"{starter} has RANK and WORLD_SIZE, but not {name}",
                            hint="start with vpipe train, torchrun or srun, or set it: MASTER_ADDR and MASTER_PORT are "
                            "the address and port of rank 0")
        raise UserError(f"{starter} did not set {name} for this process",
                        hint="start with vpipe train, torchrun or srun; unset RANK and WORLD_SIZE where none of them "
                        "set them")
    return environment[name]


def read_number(environment: Mapping[str, str], name: str, starter: str) -> int:
    """Return a variable as a number. Raises UserError, naming the starter, if it is not set to one."""
    value = read_text(environment, name, starter)
    if not value.isdecimal():
        raise UserError(f"{starter} set {name} to '{value}'", hint="it must be a whole number")
    return int(value)


def starter_id(environment: Mapping[str, str], job_step: str | None) -> str:
    """Return an identity of the program that starts this process, and would start it again.

    Under torchrun it is the parent, torchrun's agent on this host, with its start, since process numbers are reused
    (where the system tells it: Linux). Under srun it is ``job_step``, which stays when the job is requeued.
    """
    if RankEnvironment.AGENT in environment:
        return environment[RankEnvironment.AGENT]  # this process has replaced itself in a container
    if job_step is not None:
        return f"{environment.get('SLURM_CLUSTER_NAME', '')} job {job_step}".strip()
    parent, began = os.getppid(), ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {parent} on {socket.gethostname()} since {began}"


def joining(rank: int, ranks: int) -> int:
    """Return how many descriptors a rank opens to join ``ranks``, as measured over gloo on Linux.

    Rank 0 has four per rank: of the store, the failure detector, gloo and shared memory. The others have the last two.
    """
    return 21 + 4 * ranks if rank == 0 else 9 + 2 * ranks


def reserve_for_joining(rank: int, ranks: int) -> None:
    """Raise this process's limit so that it can join the others. Raises UserError: the hard limit is too low."""
    reserve(open_files() + joining(rank, ranks), f"rank {rank} of {ranks} needs")


def reserve(needed: int, who: str) -> None:
    """Raise this process's limit to so many descriptors and more. Raises UserError: the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed + SPARE:
        return
    if hard != unlimited and hard < needed:
        raise UserError(f"{who} about {needed} file descriptors, but a process here may have {hard}",
                        hint=f"raise the limit before it starts: ulimit -n {needed}; above the hard limit (ulimit -Hn) "
                             "only root may")
    wanted = max(needed + SPARE, ENOUGH)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == unlimited else min(hard, wanted), hard))


@contextmanager
def named_if_none_left() -> Iterator[None]:
    """Raise an error of this rank because no descriptor was left as one that says so."""
    try:
        yield
    except Exception as error:
        if (named := RunError.for_want_of_descriptors(error, int(os.environ.get("RANK", "0")))) is None:
            raise
        raise named from error


def open_files() -> int:
    """Return how many descriptors this process has."""
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return AT_START
