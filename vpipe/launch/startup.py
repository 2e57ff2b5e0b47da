"""Agree with all ranks before the training: all can train, on the same data, in which folder, from which checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from vpipe.checkpoint.directory import Checkpoints
from vpipe.config.config import parse_resolved
from vpipe.config.yaml_tree import parse
from vpipe.distributed.environment import RankEnvironment
from vpipe.distributed.failure_detector import WatchdogTiming
from vpipe.distributed.network import source_towards_name
from vpipe.errors import Problem, RunError, StartError, UserError, VpipeError
from vpipe.launch.checks import ranks_of
from vpipe.launch.failure_report import first_report
from vpipe.launch.restart import Failure, Starter, give_up_reason, newest_intact, restart_message
from vpipe.train.job import Job
from vpipe.train.resume import ResumePoint, check_config, checkpoint_roots, nothing_left, prepare_run, run_config
from vpipe.train.run_folder import CONFIG, last_step

JOIN_S = 120.0
"""For all processes to be started."""

SILENT_S = 60.0
"""Without a sign of life from a rank that starts. Preparing a large text takes minutes, in which it gives signs."""


def starting_timing(timeout_s: float) -> WatchdogTiming:
    """Return the watchdog's timing until all ranks begin to train."""
    usual = WatchdogTiming.from_timeout(timeout_s)
    return WatchdogTiming(usual.beat_s, max(SILENT_S, usual.silent_s), usual.grace_s, usual.long_s, JOIN_S)


def rank_state(rank: RankEnvironment, error: VpipeError | None, data: str) -> dict[str, Any]:
    """Return what the others must know of a rank that has looked at the config.

    Args:
        error: why it cannot train.
        data: the fingerprint of its data.
    """
    problems: list[list[str | None]] = []
    if isinstance(error, UserError):
        problems = [[problem.what, problem.hint, problem.where] for problem in error.problems]
    elif isinstance(error, RunError):
        problems = [[error.located, error.hint, None]]
    return {"host": rank.host, "agent": rank.agent, "data": data, "source": source_towards_name(rank.address),
            "status": error.exit_status if error else 0, "problems": problems}


def combined_error(states: Sequence[Mapping[str, Any]]) -> VpipeError | None:
    """Return all that the ranks found wrong as one error: each thing once, with the ranks that met it if not all did.

    Args:
        states: by rank, see :func:`rank_state`.
    """
    found: dict[tuple[str, str, str | None], list[int]] = {}
    for rank, state in enumerate(states):
        for what, hint, where in state["problems"]:
            found.setdefault((what, hint, where), []).append(rank)
    problems = [Problem(what + (f" ({_named(ranks, states)})" if len(ranks) < len(states) else ""), hint, where)
                for (what, hint, where), ranks in found.items()]
    if not problems:
        return _different_data(states)
    if all(state["status"] in (0, UserError.exit_status) for state in states):
        return StartError.all_of(problems)
    first, *more = problems
    return RunError(first.what + (f" ({first.where})" if first.where else ""),
                    hint="\n".join([first.hint, *map(str, more)]))


def _different_data(states: Sequence[Mapping[str, Any]]) -> UserError | None:
    """Refuse ranks that read other data than others: they would train, and learn nothing."""
    by_data: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        by_data.setdefault(state["data"], []).append(rank)
    if len(by_data) < 2:
        return None
    what = "; ".join(f"{_named(ranks, states)} read {data}" for data, ranks in by_data.items())
    return StartError(f"the ranks do not read the same data: {what} (a hash of the vocabulary's size, the numbers of "
                     "samples and the first batch)", hint="copy the same files, or the prepared data "
                     "(dataset.cache_directory), to all hosts")


def _named(ranks: Sequence[int], states: Sequence[Mapping[str, Any]]) -> str:
    on = sorted({str(states[rank]["host"]) for rank in ranks})
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(on)}"


def address_towards(rank: RankEnvironment, states: Sequence[Mapping[str, Any]]) -> str:
    """Return an address on the route to the other hosts: rank 0's, or where that means this very host, another rank's.

    Many systems give a host's own name a loopback address.
    """
    sources = [state["source"] for state in states]
    if not (sources[rank.rank] or "").startswith("127."):
        return rank.address
    return next((source for source in sources if source is not None and not source.startswith("127.")), rank.address)


@dataclass(frozen=True)
class Conclusion:
    """The run that rank 0 has made ready, for all ranks.

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
    def make(cls, member: RankEnvironment, job: Job, start: ResumePoint | None, restarts: int | None,
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
        run = starter.find_run(job.config.log_directory, start.folder, again=again) \
            if again or member.starter == "torchrun" else None
        if run is not None:
            failures, resumed = _failures(run, restarts), start.folder
            newest = (found for root in checkpoint_roots(run) if (found := newest_intact(root)) is not None)
            start = ResumePoint(run, next(newest, start.checkpoint))
            print(restart_message(f"attempt {2 + max(member.restarts - 1, len(failures) - 1, 0)}",
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
        """Return the job of all ranks; ``own`` is what this one would have done by itself."""
        if own.config.resolved_yaml() == self.config:
            return own
        return Job.from_config(parse_resolved(self.config), checked=True)


def _going_on(run: Path, job: Job, start: ResumePoint, config: str, ranks: int) -> Job:
    """Return the job of the next attempt: that of the attempt before, with its plan; after a change of the config, the
    job of the new config, cut as before where ``parallel`` is the same.

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
    """Return the failures of a run's attempts.

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
    why = "it would come again" if report.get("lasting") or report["user"] else give_up_reason(failures, restarts)
    if why is not None:
        saved = any(Checkpoints(root).newest() is not None for root in checkpoint_roots(run))
        raise UserError(f"{what}; not started again: {why}",
                        hint=f"mend it, then go on with: vpipe train --resume {quote(str(run))}" if saved else
                        f"mend it, then begin anew: vpipe train {quote(str(run / CONFIG))}")
    return failures


def _name(checkpoint: Path | None) -> str:
    return "" if checkpoint is None else checkpoint.name
