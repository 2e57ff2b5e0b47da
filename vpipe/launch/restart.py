"""Restart a run after a failure: from which checkpoint, when to give up, and how the next attempt finds its run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.integrity import find_damage
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError

SLOW_S = 2.0
"""From when on reading a checkpoint is shown."""

@dataclass(frozen=True)
class Failure:
    """How an attempt ended.

    Attributes:
        what: was said of it.
        step: the last one that was recorded; None without one.
        checkpoint: the name of the one that it went on from; empty for the beginning.
    """

    what: str
    step: int | None
    checkpoint: str

    @property
    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "step": self.step, "checkpoint": self.checkpoint}

    def repeats(self, other: Failure) -> bool:
        """Whether the other one was the same, from the same checkpoint and at the same step: then it would come again.

        What the rank that speaks was at meanwhile, after a semicolon, does not count.
        """
        return (self.what.partition(";")[0], self.step, self.checkpoint) == (
            other.what.partition(";")[0], other.step, other.checkpoint)


def over(failures: Sequence[Failure], restarts: int | None) -> str | None:
    """Why nothing is started after these failures of a run, the last one of which is new; None when it is.

    Args:
        restarts: how many there may be; None leaves that to who starts it.
    """
    if len(failures) > 1 and failures[-1].repeats(failures[-2]):
        step = failures[-1].step
        return "the same failure came twice in a row " + ("before the first step" if step is None else
                                                         f"after step {step}") + ", so it would come again"
    if restarts is not None and len(failures) > restarts:
        return f"it was attempt {len(failures)} of {restarts + 1}"
    return None


def newest_intact(root: Path) -> Path | None:
    """The newest checkpoint of a run of which nothing is damaged; one that is passed over is named on stderr."""
    for checkpoint in reversed(Checkpoints(root).all()):
        try:
            found = list(map(str, find_damage(checkpoint, _shown(f"looking at {checkpoint.name}"))))
        except UserError as error:
            found = [error.problems[0].what]
        if not found:
            return checkpoint.absolute()
        print(f"{checkpoint.name} is passed over: {found[0]}", file=sys.stderr, flush=True)
    return None


def _shown(what: str) -> Callable[[int, int], None]:
    """Shows how far something is, when it takes long."""
    said_at = monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said_at
        if monotonic() - said_at > SLOW_S:
            said_at = monotonic()
            print(f"{what}: {100 * done // total} %", file=sys.stderr, flush=True)

    return progress


def announced(attempt: str, what: str, checkpoint: Path | None) -> str:
    """``attempt 2 of 4: rank 2 ended without a word; going on from step 40``."""
    from_where = "beginning anew, since there is no checkpoint yet" if checkpoint is None else \
        f"going on from step {Manifest.load(checkpoint).step}"
    return f"{attempt}: {what}; {from_where}"


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
