"""A schedule as a value: where the stages live, and the actions of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from vpipe.schedules.action import Action, Kind
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.size import Placement


@dataclass(frozen=True)
class Schedule:
    """Hold one list of actions per rank, and the bounds that the checker proves for them.

    Attributes:
        name: of the registered schedule, or of the file.
        placement: ranks per stage; with several, they take turns.
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
    def assignment(self) -> Assignment:
        """The microbatches of every replica and of every update."""
        return Assignment(self.placement, self.update_every, self.flush, lambda number: 0 <= number < self.microbatches)

    @cached_property
    def kinds(self) -> set[Kind]:
        """Return the kinds of its actions."""
        return {action.op for program in self.programs for action in program}

    @property
    def lowered(self) -> bool:
        """Tell whether there are transfers or sums; without any, actions wait directly for each other."""
        return any(kind.transfer is not None or kind.summed for kind in self.kinds)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of every backward that comes in two halves."""
        return frozenset((stage, index) for program in self.programs for op, stage, index in program
                         if op.returns and not op.completes)

    @property
    def offloaded_stages(self) -> set[int]:
        """Return the stages of which activations are copied to the host."""
        return {action.stage for program in self.programs for action in program if action.op.host_bytes is not None}

    def updates(self, stage: int) -> int:
        """Return the number of updates of a stage; the last may have fewer microbatches."""
        return -(-self.microbatches // self.assignment.per_update(stage))

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> Schedule:
        """Return the same schedule with other programs."""
        return replace(self, programs=tuple(map(tuple, programs)))

    def compute_only(self) -> Schedule:
        """Return the schedule with what a generator yields: no transfers, no exchanges."""
        return self.with_programs([[action for action in program if action.op.generated] for program in self.programs])


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


def describe_rank(placement: Placement, rank: int) -> str:
    """Return a rank with its stages for messages: ``rank 2 (stage 2)``."""
    stages = stages_of_rank(placement, rank)
    return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
