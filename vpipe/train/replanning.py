"""Whether the ranks of a run work equally long, asked once, after it has warmed up; and what would be better."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.pipeline import Pipeline
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.profile import Profile
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import Op
from vpipe.schedules.prepare import is_file
from vpipe.train.job import Job, device_of
from vpipe.train.rank_times import Gather
from vpipe.train.run_folder import PLAN, PROFILE
from vpipe.units import size_text

WARM_UP = 10
"""Steps before the measured ones: memory pools fill, and the pipeline without a flush does."""

MEASURED = 20
"""Steps whose work is compared."""

ALLOWED = 0.15
"""How much more than the mean of all ranks the slowest may work before anything is said."""

WORTH = 0.01
"""Share of a step that another partition must save to be named."""

COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT, Op.RECOMPUTE)
UPDATE = (Op.STEP, Op.NORM)

log = logging.getLogger("vpipe")


class Replanning:
    """Compares the ranks of a run, on the first of them; made and told of every step on all ranks alike.

    Nobody waits for anybody: when a rank is through with the measured steps, it sends what it counted and goes on, and
    the first rank looks for it when all must have sent it. On GPUs nothing is said: the time of what they compute is
    not known to the process.

    Args:
        folder: of the run, where the profile is, if it has one.
        note: shows a line.
        warm_up, measured: steps.
    """

    def __init__(self, job: Job, pipe: Pipeline, folder: Path, note: Callable[[str], None],
                 warm_up: int = WARM_UP, measured: int = MEASURED) -> None:
        self._job, self._pipe, self._folder, self._note = job, pipe, folder, note
        self._warm_up, self._measured = warm_up, measured
        self._steps = self._all_steps = 0  # since the pipeline was last emptied, and at all
        self._emptying = False
        self._before: dict[int, Tensor] = {}  # by rank of this process, as :meth:`_spent`
        self._filled: dict[int, Tensor] = {}  # the same, when an empty pipeline was about to be filled
        self._pieces: dict[int, Tensor] = {}  # spent between two moments at which the pipeline was empty
        self._piece_steps = 0
        self._over = measured  # steps that were counted
        self._until_end = 2 * len(job.placement)
        self._counted: Gather | None = None
        self._ended = job.schedule.ranks == 1 or device_of(job.config).type == "cuda"

    def step(self) -> None:
        """Another step is done."""
        if self._ended:
            return
        self._steps += 1
        self._all_steps += 1
        if self._counted is not None:
            self._until_end -= 1
            if self._until_end == 0:
                self.end()
        elif self._emptying:
            pass
        elif self._steps == self._warm_up:
            self._before = self._spent()
        elif self._steps == self._warm_up + self._measured:
            spent = self._spent()
            self._count({rank: spent[rank] - before for rank, before in self._before.items()}, self._measured)

    def interrupted(self) -> None:
        """The pipeline is about to be emptied: the last steps of one without a flush are not like the others."""
        self._emptying = not self._job.schedule.flush

    def emptied(self) -> None:
        """No microbatch is under way. Where there is no flush, ranks are at different microbatches but now: what they
        spent since the pipeline was last empty is of the same steps."""
        self._emptying = False
        if self._ended or self._counted is not None or self._job.schedule.flush:
            return
        if self._filled:
            for rank, spent in self._spent().items():
                self._pieces[rank] = self._pieces.get(rank, 0) + spent - self._filled[rank]
            self._piece_steps += self._steps
        self._steps = 0
        if self._piece_steps >= self._measured:
            self._count(self._pieces, self._piece_steps)

    def filled_again(self) -> None:
        """The pipeline that was emptied goes on."""
        if not self._ended and not self._job.schedule.flush and self._all_steps >= self._warm_up:
            self._filled = self._spent()

    def end(self) -> None:
        """The last step is done, or long ago: say what there is to say."""
        if self._ended:
            return
        self._ended = True
        if self._counted is None:
            return
        counted = self._counted.finish(self._job.config.parallel.timeout_s)
        if self._pipe.rank == 0:
            line = said(Compared.of(self._job, counted, self._over), self._job, self._profile, self._plan(),
                        from_file=self._job.plan is None)
            if line is not None:
                self._note(line)

    def _spent(self) -> dict[int, Tensor]:
        return {rank: _spent(worker, len(self._job.placement)) for rank, worker in self._pipe.engine.workers.items()}

    def _count(self, spent: dict[int, Tensor], steps: int) -> None:
        self._counted = Gather(spent, self._pipe.rank, self._job.schedule.ranks, "sharing how long it works")
        self._over = steps

    def _plan(self) -> Plan | None:
        """That the run follows: one of its own making, or the one that the launcher left in its folder."""
        if self._job.plan is not None or not (self._folder / PLAN).exists():
            return self._job.plan
        try:
            return Plan.load(self._folder / PLAN)
        except UserError as error:  # the run goes on without
            log.warning("%s", error)
            return None

    def _profile(self) -> Profile | None:
        """Of this job on this device: the one that the run was planned with, or one that was measured before."""
        from vpipe.profiling.cache import cached  # which few runs need
        from vpipe.train.planning import identity_of

        size, ranks = self._job.config.microbatch_size, self._job.schedule.ranks
        try:
            if (self._folder / PROFILE).exists():
                return Profile.load(self._folder / PROFILE)
            return cached(identity_of(self._job, size, ranks),  # as if all were on one host
                          self._job.config.dataset.cache_directory, log.warning)
        except UserError as error:  # the run goes on without
            log.warning("%s", error)
            return None


def _spent(worker: Worker, stages: int) -> Tensor:
    """[2, stages] seconds of a rank so far: in microbatches and in optimizer steps; 0 for stages of others."""
    return torch.tensor([[sum(worker.seconds.get((stage, op), 0.0) for op in ops) for stage in range(stages)]
                         for ops in (COMPUTE, UPDATE)], dtype=torch.float64)


@dataclass(frozen=True)
class Compared:
    """How long the ranks and stages of a run work.

    Attributes:
        rank_s: of each rank, per step.
        microbatch_s: of each stage, per microbatch: forward, backward, recompute.
    """

    rank_s: tuple[float, ...]
    microbatch_s: tuple[float, ...]

    @classmethod
    def of(cls, job: Job, counted: dict[int, Tensor], steps: int) -> Compared:
        """From what every rank spent in so many steps; see :func:`_spent`."""
        microbatches = steps * job.schedule.rounds.per_step
        return cls(tuple(float(counted[rank].sum()) / steps for rank in sorted(counted)),
                   tuple(float(seconds) / microbatches for seconds in torch.stack(list(counted.values())).sum(0)[0]))

    @property
    def slowest(self) -> int:
        """The rank that works longest."""
        return max(range(len(self.rank_s)), key=self.rank_s.__getitem__)

    @property
    def imbalance(self) -> float:
        """How much longer than the mean of all the slowest rank works: 0.15 is 15 %."""
        return self.rank_s[self.slowest] * len(self.rank_s) / sum(self.rank_s) - 1


def said(compared: Compared, job: Job, profile: Callable[[], Profile | None], plan: Plan | None = None, *,
         from_file: bool = False) -> str | None:
    """What a person is told: nothing while the ranks are about equal, or as unequal as planned.

    Args:
        profile: finds that of the job, if there is one; asked where it is needed.
        plan: that the run follows.
        from_file: whether its config names that plan.
    """
    rank = compared.slowest
    log.info("work per step, in ms: %s; the slowest %.0f %% above the mean",
             ", ".join(f"{1e3 * seconds:.1f}" for seconds in compared.rank_s), 100 * compared.imbalance)
    expected = None if plan is None or plan.partition != job.partition else plan.predictions
    if compared.imbalance <= ALLOWED or (
            expected is not None and compared.imbalance - _above_mean(expected, job, rank) <= ALLOWED):
        return None
    stages = [stage for stage, ranks in enumerate(job.placement) if rank in ranks]
    text = (f"out of balance: {job.describe(rank)} works {1e3 * compared.rank_s[rank]:.1f} ms per {job.step_name}, "
            f"{100 * compared.imbalance:.0f} % more than the ranks on average")
    if expected is not None:
        text += (f" ({1e3 * sum(compared.microbatch_s[stage] for stage in stages):.1f} ms per microbatch, planned were "
                 f"{1e3 * sum(map(_microbatch_s, (expected.stages[stage] for stage in stages))):.1f})")
    return f"{text}; {_remedy(compared.microbatch_s, job, profile(), from_file=from_file)}"


def _microbatch_s(stage: StagePrediction) -> float:
    return stage.forward_s + stage.backward_s + stage.recompute_s


def _above_mean(expected: Prediction, job: Job, rank: int) -> float:
    """By how much a rank was planned to work longer than the mean of all: 0.15 is 15 %."""
    work = [0.0] * job.schedule.ranks
    for stage, ranks in zip(expected.stages, job.placement, strict=True):
        for one in ranks:
            work[one] += _microbatch_s(stage) * job.schedule.rounds.per_step / len(ranks) + stage.step_s
    return work[rank] * len(work) / sum(work) - 1


def _remedy(microbatch_s: Sequence[float], job: Job, profile: Profile | None, *, from_file: bool) -> str:
    parallel = job.config.parallel
    if is_file(parallel.schedule):
        return "no partition is planned for a schedule from a file"
    if profile is None or len(profile.layers) != len(job.model):
        return "vpipe plan CONFIG finds a better partition"
    from vpipe.plan.solver import Request, better_partition  # which few runs need
    from vpipe.train.planning import memory_limit

    memory, microbatches = memory_limit(job.config, profile), job.config.training.num_microbatches
    anew = any(job.recomputed) and not isinstance(parallel.recompute, float)
    request = Request({microbatches: profile}, job.schedule.ranks, memory, (parallel.schedule,),
                      {microbatches: parallel.update_every}, job.placement,
                      recompute=None if anew or isinstance(parallel.recompute, str) else parallel.recompute)
    plan, gain = better_partition(request, job.partition, job.recomputed, microbatch_s)
    if plan is not None and gain >= WORTH:
        return (f"the partition {list(plan.partition)} in place of {list(job.partition)} is expected to save "
                f"{100 * gain:.0f} % of a step (set parallel.partition" + (" and recompute: auto" if anew else "")
                + (", and leave parallel.plan out)" if from_file else ")"))
    text = f"no other partition than {list(job.partition)} is expected to be faster"
    if memory is not None:
        unlimited = replace(request, memory_bytes=None)
        plan, gain = better_partition(unlimited, job.partition, job.recomputed, microbatch_s)
        if plan is not None and gain >= WORTH and (peak := _fullest_bytes(plan)) > memory:
            text += (f" in {size_text(memory)} per rank; {list(plan.partition)} would save {100 * gain:.0f} % of a "
                     f"step in {size_text(peak, up=True)}")
    return text


def _fullest_bytes(plan: Plan) -> int:
    """What the rank of a plan that holds most is expected to hold."""
    assert plan.predictions is not None, "a solution's plan has them"
    held: dict[int, int] = {}
    for stage in plan.predictions.stages:
        for rank in stage.ranks:
            held[rank] = held.get(rank, 0) + stage.memory.peak
    return max(held.values())
