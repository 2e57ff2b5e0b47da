"""Which process started a run's ranks, so that it finds the run again when it starts them anew: torchrun and srun."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vpipe.launch.restart import Failure
from vpipe.launch.variables import AGENT

FILE = "starter.json"
"""In the run's folder."""


@dataclass(frozen=True)
class Starter:
    """What started a run, and how its attempts ended.

    Attributes:
        name: torchrun or srun.
        agents: what stays the same when it starts the ranks again: see :func:`agent_of`; several with several hosts.
        failures: of the attempts before.
        checkpoint: the name of the one that this attempt went on from; empty for the beginning.
        config: as YAML, what this attempt was told before anything was planned or fitted.
        ended: whether the run has come to its end.
    """

    name: str
    agents: tuple[str, ...]
    failures: tuple[Failure, ...] = ()
    checkpoint: str = ""
    config: str = ""
    ended: bool = False

    @classmethod
    def read(cls, folder: Path) -> Starter | None:
        """Of a run; None where nothing is said, or in half."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads((folder / FILE).read_text())
            failures = tuple(Failure(**failure) for failure in said["failures"])
            return cls(said["starter"], tuple(said["agents"]), failures, said["checkpoint"], said["config"],
                       said["ended"])
        return None

    def write(self, folder: Path) -> None:
        """Say it in the run's folder."""
        partial = folder / f"{FILE}.tmp"
        partial.write_text(json.dumps({"starter": self.name, "agents": self.agents,
                                       "checkpoint": self.checkpoint, "config": self.config, "ended": self.ended,
                                       "failures": [failure.as_json for failure in self.failures]}))
        partial.replace(folder / FILE)

    def run_begun(self, log_directory: Path, resumed: Path | None, *, again: bool) -> Path | None:
        """The folder of the latest run that one of these agents began, and would begin again; None for a new one.

        A script under torchrun may train several times, each with a config of its own or after the one before has
        ended; a step of a job is one training, whatever becomes of its config while it waits for the next attempt.

        Args:
            resumed: the run that goes on by the user's wish.
            again: whether the starter says that it starts the ranks again.
        """
        for path in sorted(log_directory.glob(f"*/{FILE}"), reverse=True):
            found = self.read(path.parent)
            if found is None or found.name != self.name or not set(found.agents) & set(self.agents):
                continue
            same = self.name == "srun" or found.config == self.config or path.parent == resumed
            if same and (again or not found.ended):
                return path.parent
        return None

    @classmethod
    def end(cls, folder: Path) -> None:
        """Note that the run in this folder has come to its end."""
        if (found := cls.read(folder)) is not None:
            replace(found, ended=True).write(folder)


def agent_of(environment: Mapping[str, str], job_step: str | None) -> str:
    """What starts this process, and would start it again.

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
