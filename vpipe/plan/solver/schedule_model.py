"""Model a schedule for the solver: what a stage holds, and how the times of the stages add up to the time of a step.

``t`` is the time that a stage spends on a microbatch, ``b`` the slowest stage, m the microbatches of a step:

===========================  ===================================================================
with a flush                 m t_b + the t of all other stages, less the weight halves that fill it
without                      t_b per microbatch
===========================  ===================================================================

The solver needs no list of schedules for this: :func:`traits_of` measures a registered schedule on small pipelines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property

from vpipe.errors import CheckError, UserError
from vpipe.plan.solver.stage_table import StageDemand
from vpipe.schedules.action import Op
from vpipe.schedules.build import build, replica_views
from vpipe.schedules.check import check
from vpipe.schedules.costs import Costs
from vpipe.schedules.lower import lower
from vpipe.schedules.peaks import rank_peaks
from vpipe.schedules.registry import Recipe, recipe_named
from vpipe.schedules.replication import ReplicaView
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.simulate import simulate
from vpipe.schedules.size import Placement, Size, widened


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a schedule, measured on small pipelines. The defaults are the cautious ones.

    Attributes:
        split: its backwards come in halves.
        filling_halves: weight halves per stage and step that run while others wait. ZB-H1, whose bubble is
            (p-1)(F+I-W), has 2, ZB-H2 with (p-1)(F+I-2W) has 3, a schedule with 1F1B's bubble none.
        tight: every microbatch waits for its transfers, not only the first and the last. That is so where too few
            microbatches are in flight to hide a transfer that takes as long as a forward.
        by_depth: what a stage holds depends only on the ranks in and behind it. Then stages may have unequal numbers of
            replicas.
        problem: why it cannot run, where the checker refuses it on a small pipeline; else empty.
    """

    split: bool = False
    filling_halves: float = 0.0
    tight: bool = True
    by_depth: bool = False
    problem: str = ""


@cache
def traits_of(recipe: Recipe) -> ScheduleTraits:
    """Measure the properties of a schedule."""
    example = next(_examples(recipe, 2, (4, 6, 8, 12)), None)
    if example is None:
        return ScheduleTraits()
    try:
        check(lower(example))
    except CheckError as error:
        return ScheduleTraits(problem=error.problems[0].what.split("\n")[0])
    split = any(action.op is Op.INPUT for program in example.programs for action in program)
    pair = list(_examples(recipe, 4, (8, 16)))
    if recipe.chunks > 1 or len(pair) < 2:
        return ScheduleTraits(split)
    alone = [simulate(schedule, _unit_costs(schedule)) for schedule in pair]
    delayed = [simulate(schedule, _unit_costs(schedule, transfer=1)) for schedule in pair]
    first, second = (late.makespan_s - soon.makespan_s for late, soon in zip(delayed, alone, strict=True))
    # At unit costs the bubble of 1F1B on 4 ranks is 9; every weight half that fills it takes 3 off.
    filling = min(max(3 - float(alone[0].bubble_s) / 3, 0.0), 3.0) if split and recipe.flush else 0.0
    return ScheduleTraits(split, filling, second > first, not split and _holds_by_depth(recipe))


def _examples(recipe: Recipe, ranks: int, microbatches: tuple[int, ...]) -> Iterator[Schedule]:
    """Yield the schedule over ``ranks`` ranks with those of ``microbatches`` that it can have."""
    for count in microbatches:
        with suppress(UserError):
            yield build(recipe.name, recipe.layout.placement(ranks, recipe.chunks), count)


def _unit_costs(schedule: Schedule, transfer: int = 0) -> Costs:
    return Costs.uniform(Size(schedule.ranks, schedule.microbatches, 1, schedule.update_every), transfer=transfer)


def _holds_by_depth(recipe: Recipe) -> bool:
    """Tell whether a rank's bounds are those of the first rank of the pipeline that begins with it."""
    for ranks in range(2, 5):
        sizes = [Size(p, 12, 1, 12 if recipe.flush else max(recipe.update_every(p), recipe.update_every(ranks)))
                 for p in range(1, ranks + 1)]
        for rank in range(1, ranks):
            for bound in (recipe.peak_activations, recipe.versions):
                if bound(rank, sizes[ranks - 1]) != bound(0, sizes[ranks - rank - 1]):
                    return False
    return True


@dataclass(frozen=True)
class ScheduleModel:
    """A schedule at some number of microbatches.

    Attributes:
        schedule: its name.
        microbatches: m.
        update_every: without a flush, microbatches per update and replica; the fewest possible when None.
        ranks: in all.
        placement: ranks per stage, one stage on each; None where the replicas of every stage are still to be chosen.
    """

    schedule: str
    microbatches: int
    update_every: int | None
    ranks: int
    placement: Placement | None

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_named(self.schedule)

    @cached_property
    def traits(self) -> ScheduleTraits:
        return traits_of(self.recipe)

    @property
    def flush(self) -> bool:
        return self.recipe.flush

    def per_replica(self, width: int) -> int:
        """Return the microbatches of a replica, at most."""
        return -(-self.microbatches // width)

    @cached_property
    def every(self) -> int:
        """Microbatches per update and replica."""
        if self.placement is not None:
            return self._views[0].size.update_every
        if self.update_every is not None:
            return self.update_every
        least = self.recipe.update_every(self.ranks)
        return min((n for n in range(least, self.microbatches + 1) if self.microbatches % n == 0), default=least)

    @cached_property
    def _views(self) -> tuple[ReplicaView, ...]:
        assert self.placement is not None
        return replica_views(self.recipe, self.placement, self.microbatches, self.update_every)

    def demand(self, behind: int, width: int) -> StageDemand:
        """Return what a replica holds at most.

        Args:
            behind: ranks in its own stage and all later ones.
            width: of its stage.
        """
        if self.placement is not None:
            return self._demands[behind]
        depth = (behind - 1) // width + 1
        own = self.per_replica(width) if self.flush else sys.maxsize  # a stream goes on behind its batch
        size = Size(depth, own, 1, own if self.flush else self.every, False)
        return StageDemand(self.recipe.peak_activations(0, size), self.recipe.versions(0, size), 0)

    @cached_property
    def _demands(self) -> dict[int, StageDemand]:
        """By ranks in and behind a stage."""
        assert self.placement is not None
        recipe, halves = self.recipe, [0] * self.ranks
        if self.traits.split:
            built = build(self.schedule, self.placement, self.microbatches)
            halves = [peaks.peak_weight_halves for peaks in rank_peaks(built)]
        demands, behind = {}, self.ranks
        for group in self.placement:
            views = [self._views[rank] if self.flush else self._views[rank].endless() for rank in group]
            demands[behind] = StageDemand(max(recipe.peak_activations(view.rank, view.size) for view in views),
                                          max(recipe.versions(view.rank, view.size) for view in views),
                                          max(halves[rank] for rank in group))
            behind -= len(group)
        return demands


def placement_of_widths(widths: tuple[int, ...]) -> Placement:
    """Return stages with these numbers of replicas, on ranks counted from 0."""
    starts = [sum(widths[:stage]) for stage in range(len(widths))]
    return tuple(tuple(range(start, start + width)) for start, width in zip(starts, widths, strict=True))


def equal_widths(schedule: str, ranks: int, width: int) -> Placement:
    """Return the schedule's placement over all ranks with ``width`` replicas of every stage."""
    recipe = recipe_named(schedule)
    return widened(recipe.layout.placement(ranks // width, recipe.chunks), width)


def refusal_of(schedule: str, placement: Placement, microbatches: int, update_every: int | None) -> str | None:
    """Return why a schedule cannot have these numbers; None when it can."""
    try:
        replica_views(recipe_named(schedule), placement, microbatches, update_every)
    except UserError as error:
        return error.problems[0].what
    return None
