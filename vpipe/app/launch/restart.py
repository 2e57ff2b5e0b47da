"""Decide after a failure whether a run starts again, from which checkpoint and for how many ranks.

Two callers start the next attempt: vpipe's own launcher in a loop (``launcher.py``); torchrun or srun, whose new rank 0
finds the run and its failures in ``starter.json`` (:meth:`Attempt.find`). Both ask :func:`give_up_reason` and
:func:`restart_point`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from vpipe import files
from vpipe.app.config.config import Config
from vpipe.app.config.parallel import AUTO
from vpipe.app.config.yaml_tree import parse
from vpipe.app.errors import LastingError
from vpipe.app.launch.failure_report import find_failure
from vpipe.app.launch.rank_env import ranks_of
from vpipe.app.progress import byte_progress
from vpipe.app.run_log import RunLog
from vpipe.app.train.resume import ResumePoint, check_config, checkpoint_roots, prepare_run, run_config
from vpipe.app.train.run_folder import CONFIG
from vpipe.checkpoint import Checkpoint, Checkpoints, Manifest
from vpipe.distributed import RankEnvironment
from vpipe.errors import RunError, UserError, counted
from vpipe.schedules import CsvFile

if TYPE_CHECKING:
    from vpipe.app.train.job import Job


@dataclass(frozen=True)
class Failure:
    """The error of an attempt, its last recorded step, and the checkpoint that it resumed; empty for the beginning."""

    what: str
    step: int | None
    checkpoint: str


def give_up_reason(failures: Sequence[Failure], restarts: int | None) -> str | None:
    """Return why no attempt follows these failures of a run, the last one of which is new; None when one does.

    Args:
        restarts: how many there may be; None leaves that to who starts the ranks.
    """
    # What the rank that reports was doing, after a semicolon, does not count.
    latest = [(failure.what.partition(";")[0], failure.step, failure.checkpoint) for failure in failures[-2:]]
    if len(failures) > 1 and latest[0] == latest[1]:
        step = failures[-1].step
        return "the same failure came twice in a row " + ("before the first step" if step is None else
                                                         f"after step {step}") + ", so it would come again"
    if restarts is not None and len(failures) > restarts:
        return f"it was attempt {len(failures)} of {restarts + 1}"
    return None


def restart_point(run: Path, start: ResumePoint | None, attempt: str, what: str) -> ResumePoint:
    """Return where the next attempt of a run starts, and print so: its newest intact checkpoint, else as before.

    Args:
        start: of the attempt before; None for the beginning.
        attempt: ``attempt 2 of 4``.
        what: failed.
    """
    point = _newest_intact(run) or ResumePoint(run, None if start is None else start.checkpoint)
    point = replace(point, other_data=start is not None and start.other_data)
    where = "starting from the beginning, since there is no checkpoint yet" if point.manifest is None else \
        f"going on from step {point.manifest.step}"
    print(f"{attempt}: {what}; {where}", file=sys.stderr, flush=True)
    return point


def _newest_intact(run: Path) -> ResumePoint | None:
    """Return the newest checkpoint of a run of which nothing is damaged; one that is skipped is named on stderr."""
    for checkpoint in (found for root in checkpoint_roots(run) for found in reversed(Checkpoints(root).all())):
        try:
            manifest = Manifest.load(checkpoint)
            with byte_progress(f"checking {checkpoint.name}") as progress:
                found = Checkpoint(checkpoint, manifest).damage(progress)
        except UserError as error:
            found = [error.problems[0].what]
        else:
            if not found:
                return ResumePoint(run, checkpoint.absolute(), manifest)
        print(f"{checkpoint.name} is skipped: {found[0]}", file=sys.stderr, flush=True)
    return None


# -- runs whose ranks torchrun or srun starts again ----------------------------------------------------------------

FILE = "starter.json"
"""The record of a starter, in the run's folder."""


@dataclass(frozen=True)
class Starter:
    """The program that started a run, and the ends of its attempts.

    Attributes:
        starter: torchrun or srun.
        agents: identities that stay the same when it starts the ranks again, one per host: see
            :func:`~vpipe.distributed.environment.starter_id`.
        failures: of the attempts before.
        checkpoint: the name of the one that this attempt resumed; empty for the beginning.
        config: of this attempt as YAML, before anything was planned or fitted.
        ended: whether the run has come to its end.
    """

    starter: str
    agents: tuple[str, ...]
    failures: tuple[Failure, ...] = ()
    checkpoint: str = ""
    config: str = ""
    ended: bool = False

    @classmethod
    def read(cls, folder: Path) -> Starter | None:
        """Return the record in a run's folder; None without one, or if it is incomplete."""
        with suppress(OSError, ValueError):
            return TypeAdapter(cls).validate_json((folder / FILE).read_bytes())
        return None

    def write(self, folder: Path) -> None:
        """Write the record into the run's folder."""
        files.replace_text(folder / FILE, json.dumps(asdict(self)))

    def find_run(self, log_directory: Path, resumed: Path | None, *, again: bool) -> Path | None:
        """Return the folder of the latest run that one of these agents began and continues; None for a new one.

        A script under torchrun may train several times, each with a config of its own or after the one before has
        ended; a step of a job is one training, even if its config is edited while it waits for the next attempt.

        Args:
            resumed: the run that ``--resume`` names.
            again: whether the starter counts a restart of the ranks.
        """
        for path in sorted(log_directory.glob(f"*/{FILE}"), reverse=True):
            found = self.read(path.parent)
            if found is None or found.starter != self.starter or not set(found.agents) & set(self.agents):
                continue
            same = self.starter == "srun" or found.config == self.config or path.parent == resumed
            if same and (again or not found.ended):
                return path.parent
        return None


@dataclass(frozen=True)
class Attempt:
    """The attempt of a run that torchrun or srun started, in rank 0.

    Attributes:
        start: the run, or the checkpoint, that it resumes; None for a new run.
        record: to be written into the run's folder.
    """

    job: Job
    start: ResumePoint | None
    record: Starter

    @classmethod
    def find(cls, rank: RankEnvironment, job: Job, start: ResumePoint | None, restarts: int | None,
             agents: Sequence[str], config: str = "") -> Attempt:
        """Find the run that these agents began, if they did; else this is a new run, or the one of ``start``.

        Args:
            job: of the config as it is now, for the ranks that are there.
            restarts: after how many failures no attempt follows, but an error; None leaves that to the starter.
            agents: of all hosts.
            config: as YAML, before it was fitted to the ranks there are.
        """
        agents = [agent for agent in agents if agent]
        record, again = Starter(rank.starter, tuple(agents), config=config), rank.restarts > 0
        # The step of a job that was not requeued is new; torchrun does not count when it starts for other hosts.
        run = record.find_run(job.config.log_directory, None if start is None else start.folder, again=again) \
            if again or rank.starter == "torchrun" else None
        if run is None:
            if again:
                print(f"{rank.starter} starts the ranks again, but no run of theirs is in "
                      f"'{job.config.log_directory}': this is a new one", file=sys.stderr, flush=True)
        else:
            before = Starter.read(run)
            assert before is not None, "it was found by that"
            failures = _failures(run, before, restarts)
            resumed = start is not None and start.folder == run  # with its config
            start = restart_point(run, start, f"attempt {2 + max(rank.restarts - 1, len(failures) - 1, 0)}",
                                  failures[-1].what if failures else f"{rank.starter} starts the ranks again")
            record = replace(record, failures=failures)
            if not resumed:
                job = _next_job(run, before, job, start, config, rank.ranks)
        checkpoint = None if start is None else start.checkpoint
        return cls(job, start, replace(record, checkpoint="" if checkpoint is None else checkpoint.name))

    def begin(self) -> Path:
        """Make the run's folder ready and return it."""
        folder = prepare_run(self.start or ResumePoint(None, None), self.job)
        if self.record.agents:
            self.record.write(folder)
        return folder


def _next_job(run: Path, before: Starter, job: Job, start: ResumePoint, config: str, ranks: int) -> Job:
    """Return the job of the next attempt: that of the attempt before, with its plan; after a change of the config, the
    job of the new config, partitioned as before where ``parallel`` is the same. Arguments as in :meth:`Attempt.find`.
    """
    from vpipe.app.train.job import Job  # which needs torch

    earlier = run_config(run)
    same_ranks = ranks_of(earlier) == ranks
    if before.config == config:
        return Job.from_config(earlier) if same_ranks else job
    print("the config has changed since the attempt before; this one follows it as it is now", file=sys.stderr,
          flush=True)
    if start.manifest is not None:
        check_config(job.config, start.manifest)
    parallel = [parse(text, "", "config").get(("parallel",)) for text in (before.config, config)]
    if same_ranks and parallel[0] == parallel[1]:
        job = Job.from_config(job.config.model_copy(update={"parallel": earlier.parallel}))
    return job


def _failures(run: Path, before: Starter, restarts: int | None) -> tuple[Failure, ...]:
    """Return the failures of a run's attempts. Raises UserError if no attempt is to follow them."""
    error = find_failure(run, "rank {}".format, {})
    if error is None:
        return before.failures  # it was stopped by a signal, or from outside
    what = error.located if isinstance(error, RunError) else error.problems[0].what
    failures = (*before.failures, Failure(what, RunLog(run).last_step(), before.checkpoint))
    lasting = isinstance(error, (UserError, LastingError))
    why = "it would come again" if lasting else give_up_reason(failures, restarts)
    if why is not None:
        saved = any(Checkpoints(root).newest() is not None for root in checkpoint_roots(run))
        raise UserError(f"{what}; not started again: {why}",
                        hint=f"mend it, then go on with: vpipe train --resume {quote(str(run))}" if saved else
                        f"mend it, then begin anew: vpipe train {quote(str(run / CONFIG))}")
    return failures


# -- another number of ranks ---------------------------------------------------------------------------------------


def fitted(config: Config, ranks: int) -> Config:
    """Return the config for another number of ranks; the batches, the learning rate and the schedule stay.

    The pipeline keeps its length and gets another number of replicas where the ranks divide evenly, else it keeps the
    replicas, else it becomes one pipeline of all ranks. The partition becomes ``auto``, and so does recomputation that
    was written per stage; ranks are assigned to stages as the schedule does. Without a flush each replica counts its
    own microbatches of an update: their number changes so that an update keeps its samples, where that is possible;
    else a note is printed.

    Raises:
        UserError: the config says what cannot be carried over.
    """
    parallel = config.parallel
    if CsvFile.is_path(parallel.schedule):
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
        if same.denominator == 1 and config.microbatches % same.numerator == 0:
            every = same.numerator
    fit = config.with_parallel(
        parallel.cut_anew(per_rank * (ranks // replicas), replicas, ahead=True), compress=compress, update_every=every,
        recompute=AUTO if isinstance(parallel.recompute, tuple) else parallel.recompute)
    there = ranks_of(fit)  # proves that there is such a schedule
    assert there == ranks, f"{there} ranks instead of {ranks}"
    before, now = (None if c.parallel.update_every is None or c.parallel.stage_to_rank_map is not None else
                   c.parallel.update_every * c.parallel.data_parallel_size for c in (config, fit))
    if before is not None and now is not None and before != now:
        print(f"elastic: an update has {counted(now, 'microbatch')} instead of {before}, at the same learning rate, "
              "and training.max_steps counts updates", file=sys.stderr, flush=True)
    return fit
