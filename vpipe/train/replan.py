"""Whether the ranks of a run work equally long, asked once, after it has warmed up; and what would be better."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.errors import UserError
from vpipe.launch.folder import PROFILE
from vpipe.pipeline import Pipeline
from vpipe.plan.profile import Profile
from vpipe.runtime.distributed import talking_with
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import Op
from vpipe.train.job import Job

WARM_UP = 10
"""Steps before the measured ones: memory pools fill, and the pipeline without a flush does."""

MEASURED = 20
"""Steps whose work is compared."""

ALLOWED = 0.15
"""How much more than the mean of all ranks the slowest may work before anything is said."""

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
        self._steps = 0
        self._before: dict[int, Tensor] = {}  # by rank of this process, as :meth:`_spent`
        self._counted: dict[int, Tensor] = {}
        self._under_way: dict[int, dist.Work] = {}  # by the other rank
        self._ended = job.schedule.ranks == 1 or job.config.parallel.backend == "nccl"

    def step(self) -> None:
        """Another step is done."""
        if self._ended:
            return
        self._steps += 1
        if self._steps == self._warm_up:
            self._before = self._spent()
        elif self._steps == self._warm_up + self._measured:
            self._count()
        elif self._steps == self._warm_up + self._measured + 2 * len(self._job.placement):
            self.end()

    def interrupted(self) -> None:
        """The pipeline was emptied between two steps: what was measured of one without a flush does not count."""
        if not self._counted and not self._job.schedule.flush:
            self._steps = 0

    def end(self) -> None:
        """The last step is done, or long ago: say what there is to say."""
        if self._ended:
            return
        self._ended = True
        for peer, work in self._under_way.items():
            with talking_with(peer, "sharing how long it works"):
                work.wait(timedelta(seconds=self._job.config.parallel.timeout_s))
        if self._counted and self._pipe.rank == 0:
            line = said(Compared.of(self._job, self._counted, self._measured), self._job, self._profile)
            if line is not None:
                self._note(line)

    def _spent(self) -> dict[int, Tensor]:
        return {rank: _spent(worker, len(self._job.placement)) for rank, worker in self._pipe.engine.workers.items()}

    def _count(self) -> None:
        self._counted = {rank: spent - self._before[rank] for rank, spent in self._spent().items()}
        here, ranks = self._pipe.rank, self._job.schedule.ranks
        if len(self._counted) == ranks:
            return  # all are in this process
        peers = [0] if here else range(1, ranks)
        for peer in peers:
            with talking_with(peer, "sharing how long it works"):
                if here:
                    work = dist.isend(self._counted[here], peer)
                else:
                    self._counted[peer] = torch.empty_like(self._counted[here])
                    work = dist.irecv(self._counted[peer], peer)
            assert work is not None, "this rank is in the default group"
            self._under_way[peer] = work

    def _profile(self) -> Profile | None:
        """Of this job on this device: the one that the run was planned with, or one that was measured before."""
        from vpipe.profiling.cache import cached  # which few runs need
        from vpipe.train.profiled import identity_of

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


def said(compared: Compared, job: Job, profile: Callable[[], Profile | None]) -> str | None:
    """What a person is told: nothing while the ranks are about equal.

    Args:
        profile: finds that of the job, if there is one; asked where it is needed.
    """
    rank = compared.slowest
    log.info("work per step, in ms: %s; the slowest %.0f %% above the mean",
             ", ".join(f"{1e3 * seconds:.1f}" for seconds in compared.rank_s), 100 * compared.imbalance)
    if compared.imbalance <= ALLOWED:
        return None
    stages = [stage for stage, ranks in enumerate(job.placement) if rank in ranks]
    text = (f"out of balance: {job.describe(rank)} works {1e3 * compared.rank_s[rank]:.1f} ms per {job.step_name}, "
            f"{100 * compared.imbalance:.0f} % more than the ranks on average")
    if job.plan is not None and job.plan.predictions is not None:
        planned = [job.plan.predictions.stages[stage] for stage in stages]
        text += (f" ({1e3 * sum(compared.microbatch_s[stage] for stage in stages):.1f} ms per microbatch, planned were "
                 f"{1e3 * sum(p.forward_s + p.backward_s + p.recompute_s for p in planned):.1f})")
    return f"{text}; {_remedy(compared.microbatch_s, job, profile())}"


def _remedy(microbatch_s: Sequence[float], job: Job, profile: Profile | None) -> str:
    if profile is None or len(profile.layers) != len(job.model):
        return "vpipe plan CONFIG finds a better partition"
    from vpipe.plan.solve import better_partition  # which few runs need

    partition, gain = better_partition(profile, job.partition, job.recomputed, job.placement, microbatch_s)
    if tuple(partition) == job.partition or gain <= 0:
        return f"no other partition than {list(job.partition)} is expected to be faster"
    return (f"the partition {list(partition)} in place of {list(job.partition)} is expected to save {100 * gain:.0f} % "
            "of the slowest stage's time (set parallel.partition"
            + (", and recompute to auto)" if any(job.recomputed) else ")"))
