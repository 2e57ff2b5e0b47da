"""Restart a run after a failure: from which checkpoint, for how many ranks, and when to give up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from time import monotonic

from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.integrity import find_damage
from vpipe.checkpoint.manifest import Manifest
from vpipe.config.config import Config
from vpipe.config.parallel import AUTO
from vpipe.errors import UserError, counted
from vpipe.launch.checks import ranks_of
from vpipe.schedules.prepare import is_file

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

    def repeats(self, other: Failure) -> bool:
        """Return whether the other failure was the same, from the same checkpoint at the same step.

        What the rank that speaks was at meanwhile, after a semicolon, does not count.
        """
        return (self.what.partition(";")[0], self.step, self.checkpoint) == (
            other.what.partition(";")[0], other.step, other.checkpoint)


def give_up_reason(failures: Sequence[Failure], restarts: int | None) -> str | None:
    """Return why nothing is started after these failures of a run, the last one of which is new; None when it is.

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
    """Return the newest checkpoint of a run of which nothing is damaged; one that is passed over is named on stderr."""
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
    """Return a callback that prints how far something is, when it takes long."""
    said_at = monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said_at
        if monotonic() - said_at > SLOW_S:
            said_at = monotonic()
            print(f"{what}: {100 * done // total} %", file=sys.stderr, flush=True)

    return progress


def restart_message(attempt: str, what: str, checkpoint: Path | None) -> str:
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
        agents: what stays the same when it starts the ranks again: see :func:`starter_id`; several with several hosts.
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
        """Return the record in a run's folder; None without one, or if it is incomplete."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads((folder / FILE).read_text())
            failures = tuple(Failure(**failure) for failure in said["failures"])
            return cls(said["starter"], tuple(said["agents"]), failures, said["checkpoint"], said["config"],
                       said["ended"])
        return None

    def write(self, folder: Path) -> None:
        """Write the record into the run's folder."""
        partial = folder / f"{FILE}.tmp"
        partial.write_text(json.dumps({"starter": self.name, "agents": self.agents,
                                       "checkpoint": self.checkpoint, "config": self.config, "ended": self.ended,
                                       "failures": [asdict(failure) for failure in self.failures]}))
        partial.replace(folder / FILE)

    def find_run(self, log_directory: Path, resumed: Path | None, *, again: bool) -> Path | None:
        """Return the folder of the latest run that one of these agents began, and goes on with; None for a new one.

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


def fitted(config: Config, ranks: int) -> Config:
    """Return the config for another number of ranks; the batches, the learning rate and the schedule stay.

    The pipeline keeps its length and gets another number of replicas where that comes out even, else it keeps the
    replicas, else it becomes one pipeline of all ranks. Its stages are cut anew, by measurement when the run starts,
    and so is what is recomputed where that was written stage by stage. Ranks that were assigned to stages are assigned
    as the schedule does. Without a flush each replica counts its own microbatches of an update: their number changes so
    that an update keeps its samples, where that comes out even.

    Raises:
        UserError: the config says what cannot be carried over.
    """
    parallel = config.parallel
    if is_file(parallel.schedule):
        raise UserError(f"elastic: {counted(ranks, 'rank')} are there, but the schedule is a file, "
                        f"'{parallel.schedule}', which is for {ranks_of(config)}", hint="name a schedule, or give it "
                        "the ranks that it has")
    if isinstance(parallel.compress, tuple) and len(set(parallel.compress)) > 1:
        raise UserError(f"elastic: {counted(ranks, 'rank')} are there, but parallel.compress says for each of "
                        f"{len(parallel.compress)} cuts how tensors travel", hint="write one word for all cuts")
    even = parallel.stage_to_rank_map is None  # all stages have as many replicas
    replicas = parallel.data_parallel_size if even else 1
    length = ranks_of(config) // replicas  # ranks of one pipeline
    per_rank = max(1, parallel.model_parallel_size // length)
    if even and ranks % length == 0:
        replicas = ranks // length
    elif ranks % replicas:
        replicas = 1
    compress = parallel.compress[0] if isinstance(parallel.compress, tuple) else parallel.compress
    every = parallel.update_every
    if even and every is not None:
        same = Fraction(every * parallel.data_parallel_size, replicas)
        if same.denominator == 1 and config.training.num_microbatches % same.numerator == 0:
            every = same.numerator
    fit = config.with_parallel(
        model_parallel_size=per_rank * (ranks // replicas), data_parallel_size=replicas, stage_to_rank_map=None,
        partition=AUTO, recompute=AUTO if isinstance(parallel.recompute, tuple) else parallel.recompute,
        warmup_depth=None, compress=compress, plan=None, update_every=every)
    there = ranks_of(fit)  # proves that there is such a schedule
    assert there == ranks, f"{there} ranks instead of {ranks}"
    return fit


def other_updates(config: Config, fit: Config) -> str | None:
    """Return a note on updates that have another number of samples with another number of ranks; None otherwise."""
    before, now = (None if c.parallel.update_every is None or c.parallel.stage_to_rank_map is not None else
                   c.parallel.update_every * c.parallel.data_parallel_size for c in (config, fit))
    if before is None or now is None or before == now:
        return None
    return (f"an update has {counted(now, 'microbatch')} instead of {before}, at the same learning rate, and "
            "training.max_steps counts updates")
