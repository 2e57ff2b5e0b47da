"""Partition a model for schedules with several stages on each rank, such as interleaved and zb_v, by a heuristic.

There, what a rank holds depends on all of its stages at once, so dynamic programming over one cut after the other finds
no best partition. The stages are cut to equal times. Each may use as large a part of its rank's memory as its part of
the microbatches that the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.solver.candidate import Candidate, Choice
from vpipe.plan.solver.partition_search import Cut, CutProblem, smallest_greatest
from vpipe.plan.solver.schedule_model import traits_of
from vpipe.plan.solver.stage_table import StageDemand, StageTable
from vpipe.plan.stage_costs import combined_memory, stage_memory
from vpipe.schedules.build import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.peaks import peak_contents
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.schedule import stages_of_rank

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def chunked_candidate(table: StageTable, choice: Choice, shares: Sequence[float] | float | None,
                      partition: Sequence[int] | None) -> Candidate | None:
    """Return a candidate; None when none was found that fits.

    Args:
        shares: share of its layers that every stage, or each, must recompute; None where that is free.
        partition: layers per stage, where they are fixed.
    """
    placement = choice.placement
    assert placement is not None
    if len(placement) > table.layers:
        return None
    demands = list(_demands(choice))
    split = traits_of(recipe_named(choice.schedule)).split
    plain = np.sum([table.running(part) for part in
                    (("forward", "input", "weight") if split else ("forward", "backward"))], axis=0)
    stages = len(placement)
    starts = None if partition is None else [sum(partition[:stage]) for stage in range(stages + 1)]

    def cut(demand_of: list[StageDemand]) -> Cut | None:
        def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
            stage = stages - behind
            work = plain[stop] - plain[first] + table.recompute_s(first, stop, demand_of[stage])
            if starts is not None:
                work = np.where((first == starts[stage]) & (stop == starts[stage + 1]), work, np.inf)
            return work, work

        return smallest_greatest(CutProblem(table.layers, _one_rank_each(stages), stages, plain, {1: 1.0}, evaluate),
                                 lambda: not _may_fit(table, demand_of))

    for attempt in _attempts(demands, shares):
        if (found := cut(attempt)) is None:
            continue
        sets = [table.recompute_set(each.first, each.stop, demand)
                for each, demand in zip(found.slices, attempt, strict=True)]
        assert all(layers is not None for layers in sets)
        recomputed = tuple(layers or frozenset() for layers in sets)
        memory = [stage_memory(table.profile, range(each.first, each.stop), layers, demand.in_flight, demand.versions,
                               demand.weight_halves)
                  for each, demand, layers in zip(found.slices, demands, recomputed, strict=True)]
        if table.limit_bytes is not None and any(
                combined_memory([memory[stage] for stage in stages_of_rank(placement, rank)]).peak > table.limit_bytes
                for ranks in placement for rank in ranks[:1]):
            continue
        seconds = _estimate_s(table, choice, found, split)
        samples = choice.microbatches * table.profile.identity.microbatch_size
        return Candidate(choice.schedule, choice.microbatches, None, placement,
                         tuple(each.stop - each.first for each in found.slices), recomputed, seconds / samples, None)
    return None


def _one_rank_each(stages: int) -> dict[int, list[int]]:
    return {behind: [1] for behind in range(1, stages + 1)}


def _may_fit(table: StageTable, demands: list[StageDemand]) -> bool:
    """Tell whether there is a cut in which every stage has room for the least that it may hold.

    That is known much sooner than what the stages would recompute.
    """
    if table.limit_bytes is None or np.isinf(demands[0].part):
        return True

    def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        demand = demands[len(demands) - behind]
        return np.zeros(first.shape), table.least_bytes(first, stop, demand) / demand.part

    needed = smallest_greatest(CutProblem(table.layers, _one_rank_each(len(demands)), len(demands), table.floor_bytes,
                                          {1: max(demand.part for demand in demands)}, evaluate))
    return needed is not None and needed.greatest <= table.limit_bytes * (1 + 1e-9)


def _attempts(demands: list[StageDemand], shares: Sequence[float] | float | None) -> Iterator[list[StageDemand]]:
    """Yield demands to try: without a limit, with each stage's part of it, at last with everything recomputed."""
    if shares is None:
        yield [demand._replace(share=0.0, part=np.inf) for demand in demands]
        yield demands
        shares = 1.0
    each = [shares] * len(demands) if isinstance(shares, (int, float)) else shares
    yield [demand._replace(share=share, part=np.inf) for demand, share in zip(demands, each, strict=True)]


def _demands(choice: Choice) -> Iterator[StageDemand]:
    """Yield what every stage holds when its rank holds most, with its part of its rank's memory."""
    assert choice.placement is not None
    built = build(choice.schedule, choice.placement, choice.microbatches)
    costs = Costs((StageCosts(1, 1, 1),) * len(choice.placement))
    of_rank = {ranks[0]: peak_contents(built, costs, ranks[0]) for ranks in dict.fromkeys(choice.placement)}
    for stage, ranks in enumerate(choice.placement):
        contents, own = of_rank[ranks[0]], of_rank[ranks[0]][stage]
        total = sum(each.in_flight + each.weight_halves + each.versions for each in contents.values())
        yield StageDemand(max(1, own.in_flight), own.versions, own.weight_halves,
                          part=(own.in_flight + own.weight_halves + own.versions) / total)


def _estimate_s(table: StageTable, choice: Choice, found: Cut, split: bool) -> float:
    """Estimate a step: the fullest rank is idle only while the pipeline fills and drains, in steps of one chunk."""
    assert choice.placement is not None
    width, groups = len(choice.placement[0]), len(set(choice.placement))
    per_rank = found.greatest * len(choice.placement) / groups
    filling = 0.0 if split else (groups - 1) * per_rank * groups / len(choice.placement)
    step = table.running("step")[-1] / groups
    return float(-(-choice.microbatches // width) * per_rank + filling + step)
