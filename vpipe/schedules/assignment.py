"""Assign microbatches to the replicas of stages and to updates.

With a flush an update takes all microbatches. Without one it takes ``update_every`` on every replica of its stage. The
last update of a stream takes the microbatches that are left; a replica may have none of it.

Where microbatches are cut into slices of their sequences, an action is of a slice: its index is ``microbatch * slices +
slice``, and whatever counts microbatches here counts slices. Those of a microbatch stay on one replica.

Source: Narayanan et al., PipeDream (SOSP 2019), section 3.2, 1F1B with round-robin over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from vpipe.schedules.size import Placement


@dataclass(frozen=True)
class Assignment:
    """Say which rank takes which microbatch through which stage, and which update its gradient goes into.

    Nothing else knows that the replicas of a stage take turns: another assignment is another class with these methods.

    Attributes:
        placement: ranks per stage.
        update_every: microbatches per update with a flush; per update and replica without.
        flush: the pipeline is empty at every update.
        has_microbatch: tells whether there is a microbatch of a number. If so, all smaller numbers exist.
        frozen: how many stages from the first on train nothing, so that no gradient is made there.
        slices: of every microbatch.
    """

    placement: Placement
    update_every: int
    flush: bool
    has_microbatch: Callable[[int], bool]
    frozen: int = 0
    slices: int = 1

    def trains(self, stage: int) -> bool:
        """Return whether gradients of a stage are made; of none outside the pipeline."""
        return stage >= self.frozen

    @staticmethod
    def replica_of(microbatch: int, width: int) -> int:
        """Return the replica, of ``width``, that takes a microbatch."""
        return microbatch % width

    @staticmethod
    def microbatch_of(turn: int, replica: int, width: int) -> int:
        """Return the microbatch that a replica takes in a turn, both from 0."""
        return turn * width + replica

    @classmethod
    def turns_of(cls, microbatches: int, replica: int, width: int) -> int:
        """Return how many of the first ``microbatches`` a replica takes."""
        return len(range(cls.microbatch_of(0, replica, width), microbatches, width))

    def width(self, stage: int) -> int:
        """Return the number of replicas of a stage."""
        return len(self.placement[stage])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that takes a microbatch through a stage; -1 outside the pipeline."""
        ranks = self._ranks.get(stage, ())
        return (ranks[self.replica_of(microbatch // self.slices, len(ranks))] if len(ranks) > 1
                else ranks[0] if ranks else -1)

    def indices(self, microbatches: int) -> int:
        """Return the number of indices that so many whole microbatches have."""
        return microbatches * self.slices

    def whole(self, index: int) -> int:
        """Return the whole microbatch that an index belongs to."""
        return index // self.slices

    def continues(self, index: int) -> bool:
        """Return whether an index belongs to the same microbatch as the one before it."""
        return index % self.slices > 0

    def part_of(self, index: int) -> str:
        """Return `` on slice 1 of 2`` for messages; nothing for a whole microbatch."""
        return f" on slice {index % self.slices} of {self.slices}" if self.slices > 1 else ""

    def name_of(self, microbatch: int) -> str:
        """Return ``microbatch 3`` for messages, or ``microbatch 1, slice 1``."""
        part = f", slice {microbatch % self.slices}" if self.slices > 1 else ""
        return f"microbatch {self.whole(microbatch)}{part}"

    def of_rank_at(self, turn: int, stage: int, rank: int) -> int:
        """Return the microbatch that a rank takes through a stage in a turn, from 0."""
        return self.microbatch_of(turn, self.placement[stage].index(rank), self.width(stage))

    @cached_property
    def _ranks(self) -> Mapping[int, Sequence[int]]:
        return dict(enumerate(self.placement))

    def update_of(self, stage: int, microbatch: int) -> int:
        """Return the update of a stage that takes the gradient of a microbatch."""
        return microbatch // self.per_update(stage)

    def per_update(self, stage: int) -> int:
        """Return the number of microbatches of a complete update of a stage."""
        return self.update_every if self.flush else self.update_every * self.width(stage)

    @cached_property
    def per_step(self) -> int:
        """The fewest microbatches with which every stage makes complete updates: one step of training."""
        return lcm(*map(self.per_update, range(len(self.placement))))

    @property
    def step_microbatches(self) -> int:
        """The whole microbatches of a step of training, see :attr:`per_step`."""
        return self.whole(self.per_step)

    def has_update(self, stage: int, update: int) -> bool:
        """Tell whether there is a microbatch for an update of a stage."""
        return self.has_microbatch(update * self.per_update(stage))

    def in_update(self, stage: int, update: int) -> range:
        """Return the microbatches of an update of a stage."""
        return self._existing(update * self.per_update(stage), self.per_update(stage))

    def in_step(self, step: int) -> range:
        """Return the microbatches of a step of training, see :attr:`per_step`."""
        return self._existing(step * self.per_step, self.per_step)

    def _existing(self, first: int, count: int) -> range:
        beyond = first + count
        while beyond > first and not self.has_microbatch(beyond - 1):
            beyond -= 1
        return range(first, beyond)

    def share(self, owner: int, update: int, stage: int, rank: int) -> Sequence[int]:
        """Return the microbatches of an update of ``owner`` that ``rank`` takes through ``stage``, in order.

        Their gradients are what is shared out: none where the stage trains nothing.
        """
        return self.taken(self.in_update(owner, update), stage, rank)

    def taken(self, microbatches: range, stage: int, rank: int) -> Sequence[int]:
        """Return those microbatches that ``rank`` takes: every ``width``-th; none where it is no rank of the stage, or
        the stage trains nothing."""
        width = self.width(stage)
        replica = self.placement[stage].index(rank) if rank in self.placement[stage] and self.trains(stage) else -1
        if self.slices > 1:
            return [index for index in microbatches if self.replica_of(index // self.slices, width) == replica]
        for first in microbatches[:width]:
            if self.replica_of(first, width) == replica:
                return microbatches[first - microbatches.start::width]
        return ()

    def contributors(self, owner: int, update: int, stage: int) -> list[int]:
        """Return the ranks of ``stage`` that make any gradient of an update of ``owner``, in replica order."""
        ranks, microbatches = self.placement[stage], self.in_update(owner, update)
        if len(microbatches) >= len(ranks) * self.slices and self.trains(stage):
            return list(ranks)
        return [rank for rank in ranks if self.taken(microbatches, stage, rank)]


def stages_of_rank(placement: Placement, rank: int) -> list[int]:
    """Return the stages that live on ``rank``, in order."""
    return [stage for stage, ranks in enumerate(placement) if rank in ranks]


def passes(placement: Placement, rank: int) -> int:
    """Return how many stages of a rank the same microbatch passes, at most.

    These are all of them, unless they are copies for different microbatches.
    """
    own = [(placement[stage].index(rank), len(placement[stage])) for stage in stages_of_rank(placement, rank)]
    if len(set(own)) == 1:
        return len(own)
    return max(sum(Assignment.replica_of(microbatch, width) == replica for replica, width in own)
               for microbatch in range(lcm(*(width for _, width in own))))


def describe_rank(placement: Placement, rank: int, lanes: Sequence[Sequence[int]] = ()) -> str:
    """Return a rank with its stages for messages: ``rank 2 (stage 2)``, ``rank 5 (lane 1, stage 2)``.

    Args:
        rank: of the job where there are several pipelines side by side.
        lanes: the job's ranks of each of these.
    """
    lane, place = next(((f"lane {number}, " * (len(lanes) > 1), own.index(rank)) for number, own in enumerate(lanes)
                        if rank in own), ("", rank))
    stages = stages_of_rank(placement, place)
    return f"rank {rank} ({lane}stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
