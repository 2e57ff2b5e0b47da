"""Compare the work of a run's ranks once, after a warm-up, and name a better partition if they are out of balance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from vpipe import Plan
from vpipe.app.train.job import Job, microbatch_of
from vpipe.app.train.observers import Observer, Run
from vpipe.app.train.run_folder import PLAN, PROFILE
from vpipe.distributed import exchange
from vpipe.errors import UserError
from vpipe.plan import Profile
from vpipe.profiling import RankGroup
from vpipe.runtime import StageUsage
from vpipe.schedules import CsvFile
from vpipe.units import size_text

if TYPE_CHECKING:
    from vpipe.plan import PlanRequest

WARM_UP = 10
"""Steps before the measured ones, in which memory pools and a pipeline without a flush fill."""

MEASURED = 20
"""Steps whose work is compared."""

ALLOWED = 0.15
"""Share above the mean that the slowest rank may work without a warning."""

WORTH = 0.01
"""Least share of a step that another partition must save to be named."""

log = logging.getLogger("vpipe")


class BalanceCheck(Observer):
    """Compare the work of all ranks on rank 0. All ranks make one, and call it after the same steps.

    No rank waits for another: each sends its times after the measured steps, and rank 0 receives them later.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._job = run, run.job
        self._steps = 0  # since the last drain
        self._done = run.job.steps_done
        self._draining = False
        self._before: dict[int, Tensor] = {}  # times of each rank of this process, see _spent
        self._refilled: dict[int, Tensor] = {}  # the same, when an empty pipeline began to fill
        self._between: dict[int, Tensor] = {}  # the same, spent between moments at which the pipeline was empty
        self._between_steps = 0
        self._until_end = 2 * len(run.job.placement)
        self._gathered: Callable[[], list[dict[str, list[list[float]]]]] | None = None
        self._ended = False

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        """Return a check where there are several ranks, of whole layers, enough steps, and times: on a GPU no process
        knows them."""
        job = run.job
        long_enough = job.updates is None or job.updates - job.steps_done >= WARM_UP + MEASURED
        compares = run.pipe.device.type == "cpu" and long_enough and job.processes == job.schedule.ranks > 1
        return cls(run) if compares else None

    def step(self, done: int) -> None:
        """Count the steps that have ended."""
        for _ in range(done - self._done):
            self._count()
        self._done = done

    def _count(self) -> None:
        if self._ended:
            return
        self._steps += 1
        if self._gathered is not None:
            self._until_end -= 1
            if self._until_end == 0:
                self.end()
        elif not self._draining and self._steps == WARM_UP:
            self._before = self._spent()
        elif not self._draining and self._steps == WARM_UP + MEASURED:
            spent = self._spent()
            self._send({rank: spent[rank] - before for rank, before in self._before.items()}, MEASURED)

    def drain(self) -> None:
        """Stop counting: while a pipeline without a flush drains, its steps are unlike the others."""
        self._draining = not self._job.schedule.flush

    def pause(self) -> None:
        """Count the time since the pipeline was last empty.

        Without a flush, ranks are at different microbatches except when it is empty; between two such moments they have
        worked on the same steps.
        """
        self._draining = False
        if self._ended or self._gathered is not None or self._job.schedule.flush:
            return
        if self._refilled:
            for rank, spent in self._spent().items():
                self._between[rank] = self._between.get(rank, 0) + spent - self._refilled[rank]
            self._between_steps += self._steps
        self._steps = 0
        if self._between_steps >= MEASURED:
            self._send(self._between, self._between_steps)

    def resume(self) -> None:
        """Begin to count again after a drain."""
        if not self._ended and not self._job.schedule.flush and self._done - self._job.steps_done >= WARM_UP:
            self._refilled = self._spent()

    def end(self) -> None:
        """Compare the ranks, if they have sent their times, and show a warning if they are out of balance."""
        if self._ended:
            return
        self._ended = True
        if self._gathered is None:
            return
        times = {int(rank): torch.tensor(spent, dtype=torch.float64)
                 for here in self._gathered() for rank, spent in here.items()}
        if self._run.pipe.rank == 0:
            line = warning(RankWork.from_times(self._job, times), self._job, self._profile, self._plan(),
                           from_file=self._job.plan is None)
            if line is not None:
                self._run.note(line)

    def _spent(self) -> dict[int, Tensor]:
        return {rank: _spent(usage, len(self._job.placement)) for rank, usage in self._run.pipe.local_usage().items()}

    def _send(self, spent: dict[int, Tensor], steps: int) -> None:
        self._gathered = exchange(timeout_s=self._job.config.parallel.timeout_s).gather(
            {str(rank): (times / steps).tolist() for rank, times in spent.items()}, "sharing how long it works")

    def _plan(self) -> Plan | None:
        """Return the plan that the run follows: its own, or the one in its folder."""
        if self._job.plan is not None or not (self._run.folder / PLAN).exists():
            return self._job.plan
        try:
            return Plan.load(self._run.folder / PLAN)
        except UserError as error:  # the run needs none
            log.warning("%s", error)
            return None

    def _profile(self) -> Profile | None:
        """Return the profile that the run was planned with, or one of this job and device from the cache."""
        from vpipe.app.train.planning import settings_of
        from vpipe.app.train.profile_cache import cached  # few runs need it

        size, parts = self._job.config.microbatch_size, self._job.config.parallel.tensor
        try:
            if (self._run.folder / PROFILE).exists():
                return Profile.load(self._run.folder / PROFILE)
            # As if all were on one host.
            ranks = RankGroup.supposed(self._run.pipe.device, self._job.schedule.ranks, tensor=parts)
            [identity] = ranks.identify(self._job.model, [microbatch_of(self._job, size)], **settings_of(self._job))
            return cached(identity.kept_as, self._job.config.dataset.cache_directory, log.warning)
        except UserError as error:  # the run needs none
            log.warning("%s", error)
            return None


def _spent(usage: Mapping[int, StageUsage], stages: int) -> Tensor:
    """Return the seconds [2, stages] of a rank so far, in microbatches and in optimizer steps; 0 for other stages."""
    spent = torch.zeros(2, stages, dtype=torch.float64)
    for stage, own in usage.items():
        spent[0, stage], spent[1, stage] = own.forward_s + own.backward_s, own.step_s + own.others_s
    return spent


@dataclass(frozen=True)
class RankWork:
    """The working time of the ranks and stages of a run."""

    rank_s: tuple[float, ...]  # seconds of each rank per step
    microbatch_s: tuple[float, ...]  # seconds of each stage per microbatch: forward, backward and recompute

    @classmethod
    def from_times(cls, job: Job, times: dict[int, Tensor]) -> RankWork:
        """Compute the work from the times of all ranks per step, see :func:`_spent`."""
        return cls(tuple(float(times[rank].sum()) for rank in sorted(times)),
                   tuple((torch.stack(list(times.values())).sum(0)[0]
                          / job.schedule.assignment.step_microbatches).tolist()))

    @property
    def slowest(self) -> int:
        """Return the rank that works longest."""
        return max(range(len(self.rank_s)), key=self.rank_s.__getitem__)

    @property
    def imbalance(self) -> float:
        """Return the share by which the slowest rank works longer than the mean: 0.15 is 15 %."""
        return self.rank_s[self.slowest] * len(self.rank_s) / sum(self.rank_s) - 1


def warning(work: RankWork, job: Job, profile: Callable[[], Profile | None], plan: Plan | None = None, *,
            from_file: bool = False) -> str | None:
    """Return a warning if the ranks are out of balance; None if they are balanced, or as unbalanced as planned.

    Args:
        profile: finds the profile of the job.
        plan: that the run follows.
        from_file: whether the config names that plan.
    """
    rank = work.slowest
    log.info("work per step, in ms: %s; the slowest %.0f %% above the mean",
             ", ".join(f"{1e3 * seconds:.1f}" for seconds in work.rank_s), 100 * work.imbalance)
    expected = None if plan is None or plan.partition != job.partition else plan.predictions
    if work.imbalance <= ALLOWED or (
            plan is not None and expected is not None and work.imbalance - _above_mean(plan, job, rank) <= ALLOWED):
        return None
    stages = [stage for stage, ranks in enumerate(job.placement) if rank in ranks]
    text = (f"out of balance: {job.describe(rank)} works {1e3 * work.rank_s[rank]:.1f} ms per {job.step_name}, "
            f"{100 * work.imbalance:.0f} % more than the ranks on average")
    if expected is not None:
        text += (f" ({1e3 * sum(work.microbatch_s[stage] for stage in stages):.1f} ms per microbatch, planned were "
                 f"{1e3 * sum(expected.stages[stage].microbatch_s for stage in stages):.1f})")
    return f"{text}; {_advice(work.microbatch_s, job, profile(), from_file=from_file)}"


def _above_mean(plan: Plan, job: Job, rank: int) -> float:
    """Return the share by which a rank was planned to work longer than the mean of all."""
    work = planned_work(plan, job)
    return work[rank] * len(work) / sum(work) - 1


def planned_work(plan: Plan, job: Job) -> list[float]:
    """Return the seconds per step that each rank was planned to work."""
    work = [0.0] * job.schedule.ranks
    for stage, ranks in zip(plan.predicted.stages, job.placement, strict=True):
        for one in ranks:
            work[one] += stage.microbatch_s * job.schedule.assignment.step_microbatches / len(ranks) + stage.step_s
    return work


def _advice(microbatch_s: Sequence[float], job: Job, profile: Profile | None, *, from_file: bool) -> str:
    parallel = job.config.parallel
    if CsvFile.is_path(parallel.schedule):
        return "no partition is planned for a schedule from a file"
    if profile is None or len(profile.layers) != len(job.model):
        return "vpipe plan CONFIG finds a better partition"
    from vpipe.app.train.planning import request_of  # few runs need it

    replan = any(job.recomputed) and not isinstance(parallel.recompute, float)
    asked = request_of(job, {job.config.microbatches: profile})
    request = replace(asked, partition=None, recompute=None if replan else asked.recompute, warmup=parallel.depths)
    memory = request.memory_bytes
    now = job.as_plan
    request = request.with_measured(now, microbatch_s)
    plan, gain = better_partition(request, now)
    if plan is not None and gain >= WORTH:
        return (f"the partition {list(plan.partition)} in place of {list(job.partition)} is expected to save "
                f"{100 * gain:.0f} % of a step (set parallel.partition" + (" and recompute: auto" if replan else "")
                + (", and leave parallel.plan out)" if from_file else ")"))
    text = f"no other partition than {list(job.partition)} is expected to be faster"
    if memory is not None:
        plan, gain = better_partition(replace(request, memory_bytes=None), now)
        if plan is not None and gain >= WORTH and (peak := plan.predicted.fullest_rank[1]) > memory:
            text += (f" in {size_text(memory)} per rank; {list(plan.partition)} would save {100 * gain:.0f} % of a "
                     f"step in {size_text(peak, up=True)}")
    return text


def better_partition(request: PlanRequest, now: Plan) -> tuple[Plan | None, float]:
    """Search a partition that is faster than a plan, and fits.

    Both are simulated, so an even partition is not preferred where ranks share cores.

    Args:
        request: with the profile, the schedule and the placement of the plan.

    Returns:
        The new plan, None when there is no better partition; and the share of the time of a step that it saves.
    """
    from vpipe.plan import predict, solve  # few runs need it

    [profile] = request.profiles.values()
    try:
        found = solve(request).plan
    except UserError:  # nothing fits, by the solver's count
        return None, 0.0
    gain = 1 - found.predicted.step_s / predict(profile, now).prediction.step_s
    return (found, gain) if gain > 0 and found.partition != now.partition else (None, 0.0)
