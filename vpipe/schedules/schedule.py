"""A schedule as a value: where the stages live, which replica takes which microbatch, and the actions of every rank.

Microbatch i goes to replica ``i mod width`` of every stage. With a flush an update takes all microbatches. Without one
it takes a *round*: ``update_every`` on every replica of its stage.

Source of the rounds: Narayanan et al., PipeDream (SOSP 2019), section 3.2, 1F1B with round-robin over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from vpipe.schedules.action import COMPUTE, Action, Op
from vpipe.schedules.size import Placement


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

    def per_update(self, stage: int) -> int:
        """Return the number of microbatches of a complete update of a stage."""
        return self.update_every if self.flush else self.update_every * self.width(stage)

    @cached_property
    def per_step(self) -> int:
        """The fewest microbatches with which every stage makes complete updates: one step of training."""
        return lcm(*map(self.per_update, range(len(self.placement))))

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
        first = microbatches.start + (self.placement[stage].index(rank) - microbatches.start) % width
        return range(first, microbatches.stop, width)

    def contributors(self, owner: int, update: int, stage: int) -> list[int]:
        """Return the ranks of ``stage`` that take any microbatch of an update of ``owner``, in replica order."""
        return [rank for rank in self.placement[stage] if self.share(owner, update, stage, rank)]


@dataclass(frozen=True)
class Schedule:
    """Hold one list of actions per rank, and the bounds that the checker proves for them.

    Attributes:
        name: of the registered schedule, or of the file.
        placement: ranks per stage; with several, microbatch i goes to the (i mod width)-th.
        programs: actions per rank.
        microbatches: how many flow through.
        update_every: microbatches per optimizer step; without a flush, on every replica.
        flush: the pipeline is empty at every step.
        peak_activations: per rank, microbatch-stages whose activations it may hold at once.
        versions: per stage, weight versions it may hold at once.
        ties: stages that borrow a stage's tied weights, by owning stage.
        stream: these programs are the beginning of a stream, which the generator registered as ``name`` continues.
        warmup: of a stream, per stage, how many forwards of a replica precede its first backward; otherwise empty.
    """

    name: str
    placement: Placement
    programs: tuple[tuple[Action, ...], ...]
    microbatches: int
    update_every: int
    flush: bool
    peak_activations: tuple[int, ...]
    versions: tuple[int, ...]
    ties: Mapping[int, tuple[int, ...]]
    stream: bool = False
    warmup: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @cached_property
    def rounds(self) -> Rounds:
        """The microbatches of every replica and of every update."""
        return Rounds(self.placement, self.update_every, self.flush, lambda number: 0 <= number < self.microbatches)

    def updates(self, stage: int) -> int:
        """Return the number of updates of a stage; the last may have fewer microbatches."""
        return -(-self.microbatches // self.rounds.per_update(stage))

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> Schedule:
        """Return the same schedule with other programs."""
        return replace(self, programs=tuple(map(tuple, programs)))

    def compute_only(self) -> Schedule:
        """Return the schedule with what a generator yields: no transfers, no exchanges."""
        generated = COMPUTE | {Op.STEP, Op.USE}
        return self.with_programs([[action for action in program if action.op in generated]
                                   for program in self.programs])


def stages_of_rank(placement: Placement, rank: int) -> list[int]:
    """Return the stages that live on ``rank``, in order."""
    return [stage for stage, ranks in enumerate(placement) if rank in ranks]


def describe_rank(placement: Placement, rank: int) -> str:
    """Return a rank with its stages for messages: ``rank 2 (stage 2)``."""
    stages = stages_of_rank(placement, rank)
    return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
