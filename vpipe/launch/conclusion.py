"""What rank 0 concludes when all ranks can train: in which folder, from which checkpoint, cut how."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vpipe.errors import UserError
from vpipe.launch.failure import first_report
from vpipe.launch.folder import CONFIG, checkpoints_root
from vpipe.launch.machine import ranks_of
from vpipe.launch.member import Member
from vpipe.launch.restart import Failure, announced, last_step, newest_intact, over
from vpipe.launch.starter import Starter
from vpipe.train.config import load_config
from vpipe.train.job import Job
from vpipe.train.resume import Start, config_of, take_up


@dataclass(frozen=True)
class Conclusion:
    """Of rank 0, for all ranks.

    Attributes:
        folder: of the run, absolute.
        checkpoint: the path of the one to go on from; None for the beginning.
        config: as YAML, with what an earlier attempt planned.
    """

    folder: str
    checkpoint: str | None
    config: str

    @classmethod
    def of(cls, member: Member, job: Job, start: Start | None, restarts: int | None,
           agents: Sequence[str]) -> Conclusion:
        """Find the run that these agents began, if they did, and make the folder ready.

        Raises:
            UserError: it is not to be started again, or cannot go on so.
        """
        start = start or Start(None, None)
        failures: tuple[Failure, ...] = ()
        agents = [agent for agent in agents if agent]
        # The step of a job that was not requeued is new; torchrun does not count when it starts for other hosts.
        again = member.restarts > 0 or member.starter == "torchrun"
        run = Starter.run_of(job.config.log_directory, member.starter, agents) if again else None
        if run is not None:
            failures = _failures(run, restarts)
            start = Start(run, newest_intact(checkpoints_root(job.config, run)) or start.checkpoint)
            print(announced(f"attempt {2 + max(member.restarts - 1, len(failures) - 1, 0)}",
                            failures[-1].what if failures else f"{member.starter} starts the ranks again",
                            start.checkpoint), file=sys.stderr, flush=True)
            earlier = config_of(run)
            if ranks_of(earlier) == member.ranks:
                job = Job.of(earlier)
        elif member.restarts:
            print(f"{member.starter} starts the ranks again, but no run of theirs is in "
                  f"'{job.config.log_directory}': this is a new one", file=sys.stderr, flush=True)
        folder = take_up(start, job)
        if agents:
            Starter(member.starter, tuple(agents), failures, _name(start.checkpoint)).write(folder)
        return cls(str(folder), None if start.checkpoint is None else str(start.checkpoint), job.config.resolved_yaml())

    @property
    def text(self) -> str:
        """As the ranks tell each other."""
        return json.dumps(asdict(self))

    def job(self, own: Job) -> Job:
        """The job of all ranks; ``own`` is what this one would have done by itself."""
        if own.config.resolved_yaml() == self.config:
            return own
        with tempfile.TemporaryDirectory(prefix="vpipe-") as name:
            path = Path(name) / CONFIG
            path.write_text(self.config)
            return Job.of(load_config(path))


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
        raise UserError(f"{what}; not started again: {why}",
                        hint=f"mend it, then go on with: vpipe train --resume {run}")
    return failures


def _name(checkpoint: Path | None) -> str:
    return "" if checkpoint is None else checkpoint.name
