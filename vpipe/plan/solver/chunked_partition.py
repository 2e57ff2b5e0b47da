"""Partitions for schedules with several stages on each rank, such as interleaved and zb_v: a heuristic.

What a rank holds there depends on all of its stages at once, so dynamic programming over one cut after the other finds
no best partition. The stages are cut to equal times; each may use a part of its rank's memory as large as its part of
the microbatches that the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.solver.draft import Draft
from vpipe.plan.solver.partition_search import Cut, CutProblem, smallest_greatest
from vpipe.plan.solver.schedule_model import traits_of
from vpipe.plan.solver.stage_table import StageDemand, StageTable
from vpipe.plan.stage_costs import combined_memory, stage_memory
from vpipe.schedules.build import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.peaks import peak_contents
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.schedule import stages_of_rank
from vpipe.schedules.size import Placement

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def cut_in_chunks(spans: StageTable, schedule: str, microbatches: int, placement: Placement,
                  told: Sequence[float] | float | None, fixed: Sequence[int] | None) -> Draft | None:
    """A partition; None when none was found that fits.

    Args:
        told: share of its layers that every stage, or each, must recompute; None where that is free.
        fixed: layers per stage, where they are told.
    """
    if len(placement) > spans.layers:
        return None
    holds = list(_holds(schedule, microbatches, placement))
    split = traits_of(recipe_named(schedule)).split
    parts = ("forward", "input", "weight") if split else ("forward", "backward")
    plain = np.sum([spans.running(part) for part in parts], axis=0)
    stages = len(placement)
    starts = None if fixed is None else [sum(fixed[:stage]) for stage in range(stages + 1)]

    def cut(hold_of: list[StageDemand]) -> Cut | None:
        def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
            work = plain[stop] - plain[first] + spans.recompute_s(first, stop, hold_of[stages - behind])
            if starts is not None:
                stage = stages - behind
                work = np.where((first == starts[stage]) & (stop == starts[stage + 1]), work, np.inf)
            return work, work

        widths = {behind: [1] for behind in range(1, stages + 1)}
        return smallest_greatest(CutProblem(spans.layers, widths, stages, plain, {1: 1.0}, evaluate),
                                 lambda: not _may_fit(spans, hold_of))

    for several in _attempts(holds, told):
        if (found := cut(several)) is None:
            continue
        recomputed = [spans.recomputed(part.first, part.stop, hold)
                      for part, hold in zip(found.parts, several, strict=True)]
        assert all(layers is not None for layers in recomputed)
        partition = tuple(part.stop - part.first for part in found.parts)
        dropped = tuple(layers or frozenset() for layers in recomputed)
        held = [stage_memory(spans.profile, range(part.first, part.stop), layers, hold.in_flight, hold.versions,
                             hold.weight_halves, spans.held)
                for part, hold, layers in zip(found.parts, holds, dropped, strict=True)]
        if spans.limit_bytes is not None and any(
                combined_memory([held[stage] for stage in stages_of_rank(placement, rank)]).peak > spans.limit_bytes
                for ranks in placement for rank in ranks[:1]):
            continue
        seconds = _estimate_s(spans, schedule, microbatches, placement, found)
        size = spans.profile.identity.microbatch_size
        return Draft(schedule, microbatches, None, placement, partition, dropped,
                     seconds / (microbatches * size), None)
    return None


def _may_fit(spans: StageTable, holds: list[StageDemand]) -> bool:
    """Whether there is a cut of which every stage has room for the least that it may hold; much sooner known than what
    it would recompute."""
    if spans.limit_bytes is None or np.isinf(holds[0].part):
        return True

    def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        hold = holds[len(holds) - behind]
        return np.zeros(first.shape), spans.least_bytes(first, stop, hold) / hold.part

    widths = {behind: [1] for behind in range(1, len(holds) + 1)}
    needed = smallest_greatest(CutProblem(spans.layers, widths, len(holds),
                                          spans.floor_bytes, {1: max(hold.part for hold in holds)}, evaluate))
    return needed is not None and needed.greatest <= spans.limit_bytes * (1 + 1e-9)


def _attempts(holds: list[StageDemand], told: Sequence[float] | float | None) -> Iterator[list[StageDemand]]:
    """First as if there were no limit, then with each stage its part of it, at last with everything recomputed."""
    if told is None:
        yield [hold._replace(share=0.0, part=np.inf) for hold in holds]
        yield holds
        told = 1.0
    shares = [told] * len(holds) if isinstance(told, (int, float)) else told
    yield [hold._replace(share=share, part=np.inf) for hold, share in zip(holds, shares, strict=True)]


def _holds(schedule: str, microbatches: int, placement: Placement) -> Iterator[StageDemand]:
    """What every stage holds when its rank holds most, and what part of its rank's memory that is."""
    built = build(schedule, placement, microbatches)
    costs = Costs((StageCosts(1, 1, 1),) * len(placement))
    loads = {ranks[0]: peak_contents(built, costs, ranks[0]) for ranks in dict.fromkeys(placement)}
    for stage, ranks in enumerate(placement):
        of_rank = loads[ranks[0]]
        total = sum(load.in_flight + load.weight_halves + load.versions for load in of_rank.values())
        own = of_rank[stage]
        yield StageDemand(max(1, own.in_flight), own.versions, own.weight_halves,
                          part=(own.in_flight + own.weight_halves + own.versions) / total)


def _estimate_s(spans: StageTable, schedule: str, microbatches: int, placement: Placement, found: Cut) -> float:
    """Of a step: as if the fullest rank were never idle but while the pipeline fills and empties in small steps."""
    width, crews = len(placement[0]), len(set(placement))
    per_rank = found.greatest * len(placement) / crews
    filling = 0.0 if traits_of(recipe_named(schedule)).split else (crews - 1) * per_rank * crews / len(placement)
    step = spans.running("step")[-1] / crews
    return float(-(-microbatches // width) * per_rank + filling + step)
