"""What rank 0 concludes when all ranks can train: in which folder, from which checkpoint, cut how."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from vpipe.checkpoint.directory import Checkpoints
from vpipe.config.config import parse_resolved
from vpipe.config.yaml_tree import parse
from vpipe.distributed.environment import RankEnvironment
from vpipe.errors import UserError
from vpipe.launch.checks import ranks_of
from vpipe.launch.failure_report import first_report
from vpipe.launch.restart import Failure, Starter, announced, newest_intact, over
from vpipe.train.job import Job
from vpipe.train.resume import ResumePoint, check_config, checkpoint_roots, nothing_left, prepare_run, run_config
from vpipe.train.run_folder import CONFIG, last_step


@dataclass(frozen=True)
class Conclusion:
    """Of rank 0, for all ranks.

    Attributes:
        folder: of the run, absolute.
        checkpoint: the path of the one to go on from; None for the beginning.
        config: as YAML, with what an earlier attempt planned.
        nothing_left: what to say in place of training; None where there are steps to make.
    """

    folder: str
    checkpoint: str | None
    config: str
    nothing_left: str | None = None

    @classmethod
    def of(cls, member: RankEnvironment, job: Job, start: ResumePoint | None, restarts: int | None,
           agents: Sequence[str], config: str = "") -> Conclusion:
        """Find the run that these agents began, if they did, and make the folder ready.

        Args:
            config: as YAML, what rank 0 was told before it was fitted to the ranks there are.

        Raises:
            UserError: it is not to be started again, or cannot go on so.
        """
        start = start or ResumePoint(None, None)
        failures: tuple[Failure, ...] = ()
        agents = [agent for agent in agents if agent]
        starter, again = Starter(member.starter, tuple(agents), config=config), member.restarts > 0
        # The step of a job that was not requeued is new; torchrun does not count when it starts for other hosts.
        run = starter.run_begun(job.config.log_directory, start.folder, again=again) \
            if again or member.starter == "torchrun" else None
        if run is not None:
            failures, resumed = _failures(run, restarts), start.folder
            newest = (found for root in checkpoint_roots(run) if (found := newest_intact(root)) is not None)
            start = ResumePoint(run, next(newest, start.checkpoint))
            print(announced(f"attempt {2 + max(member.restarts - 1, len(failures) - 1, 0)}",
                            failures[-1].what if failures else f"{member.starter} starts the ranks again",
                            start.checkpoint), file=sys.stderr, flush=True)
            if run != resumed:  # else its config was taken up already
                job = _going_on(run, job, start, config, member.ranks)
        elif member.restarts:
            print(f"{member.starter} starts the ranks again, but no run of theirs is in "
                  f"'{job.config.log_directory}': this is a new one", file=sys.stderr, flush=True)
        if (said := nothing_left(start, job)) is not None:
            return cls(str(start.folder), str(start.checkpoint), job.config.resolved_yaml(), said)
        folder = prepare_run(start, job)
        if agents:
            replace(starter, failures=failures, checkpoint=_name(start.checkpoint)).write(folder)
        return cls(str(folder), None if start.checkpoint is None else str(start.checkpoint), job.config.resolved_yaml())

    def job(self, own: Job) -> Job:
        """The job of all ranks; ``own`` is what this one would have done by itself."""
        if own.config.resolved_yaml() == self.config:
            return own
        return Job.from_config(parse_resolved(self.config), checked=True)


def _going_on(run: Path, job: Job, start: ResumePoint, config: str, ranks: int) -> Job:
    """What the next attempt of a run trains: what the one before did, with what was planned for it; or where the config
    was changed meanwhile, what it says now, cut as before where that is left as it was.

    Args:
        job: what the config says now, for the ranks that are there.
        config: the same before it was fitted to them.

    Raises:
        UserError: the config was changed so that it contradicts the checkpoint.
    """
    earlier, before = run_config(run), Starter.read(run)
    assert before is not None, "it was found by that"
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


def _failures(run: Path, restarts: int | None) -> tuple[Failure, ...]:
    """Those of a run's attempts.

    Raises:
        UserError: after them nothing is to be started again.
    """
    before = Starter.read(run)
    assert before is not None, "it was found by that"
    report = first_report(run)
    if report is None:
        return before.failures  # it was ended in good order, or from outside
    what = str(report["problems"][0][0])
    failures = (*before.failures, Failure(what, last_step(run), before.checkpoint))
    why = "it would come again" if report.get("lasting") or report["user"] else over(failures, restarts)
    if why is not None:
        saved = any(Checkpoints(root).newest() is not None for root in checkpoint_roots(run))
        raise UserError(f"{what}; not started again: {why}",
                        hint=f"mend it, then go on with: vpipe train --resume {quote(str(run))}" if saved else
                        f"mend it, then begin anew: vpipe train {quote(str(run / CONFIG))}")
    return failures


def _name(checkpoint: Path | None) -> str:
    return "" if checkpoint is None else checkpoint.name
