"""The choices of the solver: schedule, microbatches and replicas, what a stage then holds, and the plan for a choice.

The solver needs no list of schedules: :func:`traits_of` measures a registered schedule on small pipelines.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Literal

from vpipe.description.cut import Cut
from vpipe.description.order import Order
from vpipe.errors import CheckError, UserError
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile
from vpipe.plan.solver.stage_table import StageDemand
from vpipe.schedules.assignment import Placement, Size, widened
from vpipe.schedules.builder import ReplicaView, build, replica_views
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a schedule, measured on small pipelines. The defaults are the cautious ones."""

    split: bool = False  # its backwards come in halves
    # weight halves per stage and step that run while others wait. ZB-H1, whose bubble is (p-1)(F+I-W), has 2, ZB-H2
    # with (p-1)(F+I-2W) has 3, a schedule with 1F1B's bubble none.
    filling_halves: float = 0.0
    # every microbatch waits for its transfers, not only the first and the last. That is so where too few microbatches
    # are in flight to hide a transfer that takes as long as a forward.
    tight: bool = True
    # what a stage holds depends only on the number of ranks of it and of the later ones. Then stages may have
    # unequal numbers of replicas.
    by_depth: bool = False
    problem: str = ""  # why it cannot run, where the checker refuses it on a small pipeline; else empty


@cache
def traits_of(registered: RegisteredSchedule) -> ScheduleTraits:
    example = next(_examples(registered, 2, (4, 6, 8, 12)), None)
    if example is None:
        return ScheduleTraits()
    try:
        check(lower(example))
    except CheckError as error:
        return ScheduleTraits(problem=error.problems[0].what.split("\n")[0])
    split = bool(example.split_backwards)
    pair = list(_examples(registered, 4, (8, 16)))
    if registered.chunks > 1 or len(pair) < 2 or registered.places_copies(4):
        return ScheduleTraits(split)
    alone = [simulate(schedule, _unit_costs(schedule)) for schedule in pair]
    delayed = [simulate(schedule, _unit_costs(schedule, transfer=1)) for schedule in pair]
    first, second = (late.makespan_s - soon.makespan_s for late, soon in zip(delayed, alone, strict=True))
    # At unit costs the bubble of 1F1B on 4 ranks is 9; every weight half that fills it takes 3 off.
    filling = min(max(3 - float(alone[0].bubble_s) / 3, 0.0), 3.0) if split and registered.flush else 0.0
    return ScheduleTraits(split, filling, second > first, not split and _holds_by_depth(registered))


def _examples(registered: RegisteredSchedule, ranks: int, microbatches: tuple[int, ...]) -> Iterator[Schedule]:
    """Yield the schedule over ``ranks`` ranks with those of ``microbatches`` that it can have."""
    for count in microbatches:
        with suppress(UserError):
            yield build(registered.name, registered.placement(ranks, registered.chunks), count)


def _unit_costs(schedule: Schedule, transfer: int = 0) -> Costs:
    return Costs.uniform(Size(schedule.ranks, schedule.microbatches, 1, schedule.update_every), transfer=transfer)


def _holds_by_depth(registered: RegisteredSchedule) -> bool:
    """Tell whether a rank's bounds are those of the first rank of the pipeline that begins with it."""
    for ranks in range(2, 5):
        sizes = [Size(p, 12, 1, 12 if registered.flush else max(map(registered.update_every, (p, ranks))))
                 for p in range(1, ranks + 1)]
        for rank in range(1, ranks):
            for bound in (registered.peak_activations, registered.versions):
                if bound(rank, sizes[ranks - 1]) != bound(0, sizes[ranks - rank - 1]):
                    return False
    return True


Stages = tuple[tuple[int, ...], tuple[frozenset[int], ...]]
"""A partition, layers per stage, and the numbers of the recomputed layers of every stage."""


@dataclass(frozen=True)
class Choice:
    """A choice of schedule, microbatches and replicas, for which a partition is searched."""

    schedule: str
    microbatches: int  # of a batch
    update_every: int | None  # without a flush, microbatches per update and replica; the fewest possible when None
    ranks: int  # in all
    placement: Placement | None  # ranks per stage; None where every stage may have any number of replicas
    # forwards of each stage before its first backward; auto: those of 1F1B, and later as many as hide the transfers
    warmup: tuple[int, ...] | Literal["auto"] | None = None
    slices: int = 1  # of every microbatch

    @property
    def groups(self) -> Placement:
        """The ranks per stage of a choice that has them."""
        assert self.placement is not None
        return self.placement

    @property
    def chunked(self) -> bool:
        """Ranks hold several stages."""
        return self.placement is not None and sum(map(len, self.placement)) > self.ranks

    @property
    def replicated(self) -> bool:
        """Stages may have several replicas, besides the copies that the schedule itself places."""
        if self.placement is not None and self.registered.places_copies(len(self.placement)):
            return self.ranks * self.registered.chunks > len(self.placement)
        return self.placement is None or any(len(ranks) > 1 for ranks in self.placement)

    @property
    def plain(self) -> bool:
        """Every rank holds one stage, and every stage lives on one rank."""
        return not self.chunked and not self.replicated

    def with_widths(self, widths: Sequence[int]) -> Choice:
        """Return the choice with these numbers of replicas, where it leaves them open."""
        return self if self.placement is not None else replace(self, placement=placement_of_widths(widths))

    @property
    def depths(self) -> tuple[int, ...] | None:
        """Return the forwards of each stage before its first backward; those of 1F1B when None."""
        return None if isinstance(self.warmup, str) else self.warmup

    @cached_property
    def registered(self) -> RegisteredSchedule:
        return RegisteredSchedule.named(self.schedule)

    @cached_property
    def traits(self) -> ScheduleTraits:
        return traits_of(self.registered)

    @property
    def flush(self) -> bool:
        return self.registered.flush

    @property
    def any_widths(self) -> bool:
        """Stages may have unequal numbers of replicas, of which the search knows what each holds."""
        return self.traits.by_depth and self.slices == 1

    @property
    def indices(self) -> int:
        """Of a batch: as many as it has microbatches, or slices of them."""
        return self.microbatches * self.slices

    def per_index(self, profile: Profile) -> Profile:
        """Return the costs of one index, from those of a microbatch."""
        return profile.sliced(self.slices)

    @property
    def refusal(self) -> str | None:
        """Return why the schedule cannot have these numbers; None when it can, or while replicas are open."""
        try:
            _ = self.placement and self._views
        except UserError as error:
            return error.problems[0].what
        return None

    def per_replica(self, width: int) -> int:
        """Return the microbatches of a replica, at most, or their slices."""
        return -(-self.microbatches // width) * self.slices

    @cached_property
    def every(self) -> int:
        """Microbatches per update and replica."""
        if self.placement is not None:
            return self._views[0].size.update_every
        if self.update_every is not None:
            return self.update_every
        least = self.registered.update_every(self.ranks)
        return min((n for n in range(least, self.microbatches + 1) if self.microbatches % n == 0), default=least)

    @cached_property
    def _views(self) -> tuple[ReplicaView, ...]:
        return replica_views(self.registered, self.groups, self.microbatches, self.update_every, self.depths,
                             self.slices)

    def demand(self, ranks_left: int, width: int) -> StageDemand:
        """Return what each of a stage's ``width`` replicas holds at most, with ``ranks_left`` ranks in its own stage
        and all later ones."""
        if self.placement is not None:
            return self._demands[ranks_left]
        depth = (ranks_left - 1) // width + 1
        own = self.per_replica(width) // self.slices if self.flush else sys.maxsize  # a stream goes on after its batch
        size = Size(depth, own, 1, own if self.flush else self.every, False, (), self.slices)
        return StageDemand(self.registered.peak_activations(0, size), self.registered.versions(0, size), 0)

    @cached_property
    def _demands(self) -> dict[int, StageDemand]:
        """By ranks of a stage and the later ones."""
        registered, halves = self.registered, [0] * self.ranks
        built = build(self.schedule, self.groups, self.microbatches, slices=self.slices) if self.traits.split or any(
            view.shared for view in self._views) else None
        if built is not None:
            halves = [peaks.peak_weight_halves for peaks in built.rank_peaks]
        demands, ranks_left = {}, self.ranks
        for group in self.groups:
            views = [self._views[rank] if self.flush else self._views[rank].endless() for rank in group]
            demands[ranks_left] = StageDemand(max(built.peak_activations[rank] if built is not None and view.shared else
                                              registered.peak_activations(view.rank, view.size)
                                              for rank, view in zip(group, views, strict=True)),
                                          max(registered.versions(view.rank, view.size) for view in views),
                                          max(halves[rank] for rank in group))
            ranks_left -= len(group)
        return demands


def placement_of_widths(widths: Sequence[int]) -> Placement:
    """Return stages with these numbers of replicas, on ranks counted from 0."""
    return tuple(tuple(range(end - width, end)) for end, width in zip(accumulate(widths), widths, strict=True))


def equal_widths(schedule: str, ranks: int, width: int) -> Placement:
    """Return the schedule's placement over all ranks with ``width`` replicas of every stage."""
    registered = RegisteredSchedule.named(schedule)
    return widened(registered.placement(ranks // width, registered.chunks), width)


@dataclass(frozen=True)
class Candidate:
    """The plan that the solver finds for a choice, before it is simulated, and the cost model's figures for it."""

    choice: Choice  # with its placement
    partition: tuple[int, ...]  # layers per stage
    recomputed: tuple[frozenset[int], ...]  # per stage the numbers of its recomputed layers
    seconds_per_sample: float  # by the cost model
    bound: float | None = None  # no plan of this choice takes less, by the cost model; None where that is unknown
    others: Sequence[Stages] = ()  # further stages that a simulation may find better

    @classmethod
    def of(cls, plan: Plan) -> Candidate:
        """Return the candidate that a plan is made of."""
        assert plan.schedule is not None
        assert plan.microbatches is not None
        choice = Choice(plan.schedule, plan.microbatches, plan.update_every, plan.ranks, plan.groups, plan.warmup,
                        plan.order.slices or 1)
        return cls(choice, plan.partition, plan.recomputed, math.inf)

    def plan(self, profile: Profile) -> Plan:
        """Return the plan without predictions."""
        choice = self.choice
        order = Order.of(choice.schedule, slices=choice.slices if choice.slices > 1 else None,
                         update_every=None if choice.flush else choice.every, warmup=choice.depths)
        return Plan(Cut(self.partition, self.recomputed, choice.groups), order, choice.microbatches,
                    profile=profile.identity.digest, profiled=asdict(profile.identity), tensor=profile.identity.tensor,
                    zero1=profile.zero1)

    def with_stages(self, stages: Stages) -> Candidate:
        """Return the candidate with another partition."""
        return replace(self, partition=stages[0], recomputed=stages[1], others=())

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(map(len, self.choice.groups))

    @property
    def actions(self) -> int:
        """About the number of actions that a simulation executes, transfers and sums included."""
        choice, updates = self.choice, 2
        microbatches = 2 * choice.indices
        if not choice.flush:  # the pipeline fills, runs steadily and drains
            every = choice.update_every or choice.registered.update_every(choice.ranks)
            per_step = every * math.lcm(*self.widths)
            deepest = max([choice.ranks, *(max(self.widths) * depth for depth in choice.depths or ())])
            microbatches = (4 + 3 * (deepest + max(self.widths)) // per_step) * per_step
            updates = microbatches // every
        return (6 * microbatches * len(self.widths)
                + 2 * updates * sum(width * width for width in self.widths if width > 1))
