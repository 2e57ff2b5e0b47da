"""Divide the microbatches of a pipeline among the replicas of a stage and among its updates.

Microbatch i goes to replica ``i mod width`` of every stage. With a flush an update takes all microbatches. Without one
it takes a *round*: ``update_every`` on every replica of its stage.

Source: Narayanan et al., PipeDream (SOSP 2019), section 3.2, 1F1B with round-robin over replicas.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from vpipe.schedules.action import COMPLETES, PER_MICROBATCH, Action, Op
from vpipe.schedules.size import Placement, Size


@dataclass(frozen=True)
class Rounds:
    """Assign microbatches to replicas and to updates.

    The last round of a stream takes the microbatches that are left. A replica may have none of it.

    Attributes:
        placement: ranks per stage.
        update_every: microbatches per update with a flush; per update and replica without.
        flush: the pipeline is empty at every update.
        exists: tells whether there is a microbatch of a number. If so, all smaller numbers exist.
    """

    placement: Placement
    update_every: int
    flush: bool
    exists: Callable[[int], bool]

    def width(self, stage: int) -> int:
        """Return the number of replicas of a stage."""
        return len(self.placement[stage])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that takes a microbatch through a stage."""
        ranks = self.placement[stage]
        return ranks[microbatch % len(ranks)]

    def replica(self, stage: int, rank: int) -> int:
        """Return the number of the replica of a stage that a rank is."""
        return self.placement[stage].index(rank)

    def per_update(self, stage: int) -> int:
        """Return the number of microbatches of a complete update of a stage."""
        return self.update_every if self.flush else self.update_every * self.width(stage)

    @cached_property
    def per_step(self) -> int:
        """The fewest microbatches with which every stage makes complete updates: one step of training."""
        return lcm(*(self.per_update(stage) for stage in range(len(self.placement))))

    def has_update(self, stage: int, update: int) -> bool:
        """Tell whether there is a microbatch for an update of a stage."""
        return self.exists(update * self.per_update(stage))

    def in_update(self, stage: int, update: int) -> range:
        """Return the microbatches of an update of a stage."""
        return self._existing(update * self.per_update(stage), self.per_update(stage))

    def in_step(self, step: int) -> range:
        """Return the microbatches of a step of training, see :attr:`per_step`."""
        return self._existing(step * self.per_step, self.per_step)

    def _existing(self, first: int, count: int) -> range:
        beyond = first + count
        while beyond > first and not self.exists(beyond - 1):
            beyond -= 1
        return range(first, beyond)

    def share(self, owner: int, update: int, stage: int, rank: int) -> range:
        """Return the microbatches of an update of ``owner`` that ``rank`` takes through ``stage``."""
        return self._of_rank(self.in_update(owner, update), stage, rank)

    def complete_share(self, owner: int, update: int, stage: int, rank: int) -> range:
        """Return the same for a complete update, without asking which microbatches exist."""
        first = update * self.per_update(owner)
        return self._of_rank(range(first, first + self.per_update(owner)), stage, rank)

    def _of_rank(self, microbatches: range, stage: int, rank: int) -> range:
        width = self.width(stage)
        first = microbatches.start + (self.replica(stage, rank) - microbatches.start) % width
        return range(first, microbatches.stop, width)

    def contributors(self, owner: int, update: int, stage: int) -> list[int]:
        """Return the ranks of ``stage`` that take any microbatch of an update of ``owner``, in replica order."""
        return [rank for rank in self.placement[stage] if self.share(owner, update, stage, rank)]


@dataclass(frozen=True)
class ReplicaView:
    """Map a rank of a replicated stage to the unreplicated pipeline that its generator is called for.

    A generator knows pipelines with one rank per position. A replica of a stage with w replicas has every w-th
    microbatch. Before its first backward it must take enough of them to keep all later ranks at work: of R ranks in its
    own and later stages these are (R-1) // w. So the generator is called for a pipeline in which that many positions
    are behind the replica. With equally many replicas everywhere, that is its own position among the stages.

    Source of the depths: PipeDream (SOSP 2019), section 3.2.

    Attributes:
        rank: the position that the generator is called for.
        size: of the pipeline that the generator is called for, with the replica's own microbatches.
        stages: the real number of each of the generator's stages that lives on this rank.
        replica, width: the number of this replica, and how many there are.
    """

    rank: int
    size: Size
    stages: dict[int, int]
    replica: int
    width: int

    def endless(self) -> ReplicaView:
        """Return the same view of a stream whose length nobody knows."""
        return replace(self, size=replace(self.size, microbatches=sys.maxsize))

    def translated(self, program: Iterable[Action]) -> Iterator[Action]:
        """Return a generator's actions with the real numbers of stages and microbatches."""
        if self.width == 1 and all(real == own for own, real in self.stages.items()):
            return iter(program)
        return self._translated(program)

    def _translated(self, program: Iterable[Action]) -> Iterator[Action]:
        for action in program:
            number = action.microbatch
            if action.op in PER_MICROBATCH:
                number = number * self.width + self.replica
            yield Action(action.op, self.stages.get(action.stage, action.stage), number)

    def cut_to_stream(self, program: Iterator[Action], rounds: Rounds, stages: list[int]) -> Iterator[Action]:
        """Yield the actions of an endless program whose microbatches, updates and versions exist.

        An endless program is prefix-closed (:data:`vpipe.schedules.registry.Program`), so leaving out actions at its
        end changes nothing before them.
        """
        completed, stepped = Counter(dict.fromkeys(stages, 0)), Counter(dict.fromkeys(stages, 0))
        for action in program:
            if _exists(action, rounds):
                yield action
                completed[action.stage] += action.op in COMPLETES
                stepped[action.stage] += action.op is Op.STEP
            elif not any(rounds.exists(completed[stage] * self.width + self.replica)
                         or rounds.has_update(stage, stepped[stage]) for stage in stages):
                return


def _exists(action: Action, rounds: Rounds) -> bool:
    if action.op is Op.STEP:
        return rounds.has_update(action.stage, action.microbatch)
    if action.op is Op.USE:
        return action.microbatch == 0 or rounds.has_update(action.stage, action.microbatch - 1)
    return rounds.exists(action.microbatch)
