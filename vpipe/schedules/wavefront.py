"""Forwards without backwards: what an evaluation does."""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.schedules.action import Action, forward
from vpipe.schedules.lower import lower
from vpipe.schedules.order import Schedule, stages_of_rank
from vpipe.schedules.size import Placement


def wavefront(placement: Placement, microbatches: int) -> Schedule:
    """Every microbatch forward through all stages, lowered: stage s takes microbatch t - s at tick t.

    So what a stage needs was made one tick before, by whichever rank, and all stages have work at once. Of one tick
    the later stages come first, on every rank alike, so that transfers are sent and received in one order.
    """
    ranks = len({rank for ranks in placement for rank in ranks})
    programs = tuple(tuple(_forwards(placement, rank, microbatches)) for rank in range(ranks))
    peak = microbatches * len(placement)  # there is no backward to end what a forward begins
    return lower(Schedule("evaluation", placement, programs, microbatches, microbatches, True, (peak,) * ranks,
                          (1,) * len(placement), {}))


def _forwards(placement: Placement, rank: int, microbatches: int) -> Iterator[Action]:
    stages = stages_of_rank(placement, rank)
    for tick in range(microbatches + stages[-1]):
        for stage in reversed(stages):
            held_by = placement[stage]
            if 0 <= tick - stage < microbatches and held_by[(tick - stage) % len(held_by)] == rank:
                yield forward(stage, tick - stage)
