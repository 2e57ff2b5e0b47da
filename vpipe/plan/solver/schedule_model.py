"""What a schedule makes of its stages: what they hold, and how their times add up to that of a step.

The closed forms of FACTS, one place for all. ``t`` is what a stage does for a microbatch, ``b`` the stage that holds
the others up.

============================  ============================================================
gpipe, 1f1b                   m t_b + the t of all other stages
zb_h1, zb_h2                  m t_b + what of the others' t their weight halves do not fill
pipedream, 2bw                t_b per microbatch
============================  ============================================================
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, cached_property

from vpipe.errors import UserError
from vpipe.plan.solver.stage_table import StageDemand
from vpipe.schedules.action import Op
from vpipe.schedules.build import build, replica_views
from vpipe.schedules.peaks import rank_peaks
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.replication import ReplicaView
from vpipe.schedules.size import Placement, Size, widened

ALL_WIDTHS = ("gpipe", "1f1b", "pipedream", "2bw")
"""Schedules whose stages hold what the ranks behind them say, and nothing else: unequal widths are tried for these."""

_FILLED = {"zb_h1": 2.0, "zb_h2": 3.0}
"""How many weight halves fill what others wait for: its bubble is (p-1)(F+I-W), or (p-1)(F+I-2W)."""

_SLACK = ("gpipe", "zb_h2")
"""Schedules with so many microbatches in flight that transfers hold nobody up between the first and the last."""


@dataclass(frozen=True)
class ScheduleModel:
    """A schedule at some number of microbatches.

    Attributes:
        schedule: its name.
        microbatches: m.
        update_every: without a flush, microbatches per update and replica; as few as can be when None.
        ranks: in all.
        placement: ranks per stage, one stage on each; None where the replicas of every stage are still to be chosen.
    """

    schedule: str
    microbatches: int
    update_every: int | None
    ranks: int
    placement: Placement | None

    @property
    def flush(self) -> bool:
        """Whether the pipeline is empty at every update."""
        return recipe_named(self.schedule).flush

    @property
    def split(self) -> bool:
        """Whether its backwards come in halves."""
        return halves_backwards(self.schedule)

    @property
    def filled(self) -> float:
        """Weight halves per stage and step that fill what others wait for."""
        return _FILLED.get(self.schedule, 0.0)

    @property
    def tight(self) -> bool:
        """Whether a stage waits for the transfers of every microbatch."""
        return self.schedule not in _SLACK

    def own(self, width: int) -> int:
        """Microbatches of a replica, at most."""
        return -(-self.microbatches // width)

    @cached_property
    def every(self) -> int:
        """Microbatches per update and replica."""
        if self.placement is not None:
            return self._seats[0].size.update_every
        if self.update_every is not None:
            return self.update_every
        least = recipe_named(self.schedule).update_every(self.ranks)
        return min((n for n in range(least, self.microbatches + 1) if self.microbatches % n == 0), default=least)

    @cached_property
    def _seats(self) -> tuple[ReplicaView, ...]:
        assert self.placement is not None
        return replica_views(recipe_named(self.schedule), self.placement, self.microbatches, self.update_every)

    def hold(self, behind: int, width: int) -> StageDemand:
        """What a replica holds at most.

        Args:
            behind: ranks in its own stage and all later ones.
            width: of its stage.
        """
        if self.placement is not None:
            return self._holds[behind]
        recipe, depth = recipe_named(self.schedule), (behind - 1) // width + 1
        own = self.own(width) if self.flush else sys.maxsize  # a stream goes on behind its batch
        size = Size(depth, own, 1, own if self.flush else self.every, False)
        return StageDemand(recipe.peak_activations(0, size), recipe.versions(0, size), 0)

    @cached_property
    def _holds(self) -> dict[int, StageDemand]:
        """By ranks in and behind a stage."""
        assert self.placement is not None
        recipe, halves = recipe_named(self.schedule), [0] * self.ranks
        if self.split:
            built = build(self.schedule, self.placement, self.microbatches)
            halves = [facts.peak_weight_halves for facts in rank_peaks(built)]
        holds, behind = {}, self.ranks
        for crew in self.placement:
            own = [self._seats[rank] if self.flush else self._seats[rank].endless() for rank in crew]
            holds[behind] = StageDemand(max(recipe.peak_activations(seat.rank, seat.size) for seat in own),
                                        max(recipe.versions(seat.rank, seat.size) for seat in own),
                                        max(halves[rank] for rank in crew))
            behind -= len(crew)
        return holds


@cache
def halves_backwards(schedule: str) -> bool:
    """Whether the backwards of a schedule come in halves."""
    recipe = recipe_named(schedule)
    example = build(schedule, recipe.layout.placement(2, recipe.chunks), 4)
    return any(action.op is Op.INPUT for program in example.programs for action in program)


def placed(widths: tuple[int, ...]) -> Placement:
    """Stages with these numbers of replicas, on ranks counted from 0."""
    starts = [sum(widths[:stage]) for stage in range(len(widths))]
    return tuple(tuple(range(start, start + width)) for start, width in zip(starts, widths, strict=True))


def refused(schedule: str, placement: Placement, microbatches: int, update_every: int | None) -> str | None:
    """Why a schedule cannot have these numbers, if it cannot."""
    try:
        replica_views(recipe_named(schedule), placement, microbatches, update_every)
    except UserError as error:
        return error.problems[0].what
    return None


def even(schedule: str, ranks: int, width: int) -> Placement:
    """As many positions as there are, each with ``width`` replicas."""
    recipe = recipe_named(schedule)
    return widened(recipe.layout.placement(ranks // width, recipe.chunks), width)
