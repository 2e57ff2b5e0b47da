"""Partition a model for schedules with several stages on each rank, such as interleaved and zb_v, by a heuristic.

There, what a rank holds depends on all of its stages at once, so dynamic programming over one stage after another finds
no best partition. The stages are cut to equal times. Each may use as large a part of its rank's memory as its part of
the microbatches that the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vpipe.plan.profile import Profile
from vpipe.plan.solver.choice import Candidate, Choice
from vpipe.plan.solver.partition_search import (
    Floats,
    FoundPartition,
    Integers,
    smallest_bottleneck,
    unreplicated_problem,
)
from vpipe.plan.solver.stage_table import StageDemand, StageTable
from vpipe.plan.stage_costs import combined_memory, kept_bytes, stage_memory
from vpipe.schedules.assignment import stages_of_rank
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.kinds import HALF, SAVED, UPDATED
from vpipe.schedules.simulator.timeline import peak_contents


def chunked_candidate(table: StageTable, choice: Choice, shares: Sequence[float] | float | None,
                      partition: Sequence[int] | None) -> Candidate | None:
    """Return a candidate; None when none was found that fits.

    Args:
        shares: share of its layers that every stage, or each, must recompute; None where that is free.
        partition: layers per stage, where they are fixed.
    """
    placement, stages, split = choice.groups, len(choice.groups), choice.traits.split
    if stages > table.layers:
        return None
    demands = list(_demands(choice, table.profile))
    plain = table.work_s(split)

    def find(demand_of: list[StageDemand]) -> FoundPartition | None:
        def evaluate(ranks_left: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
            work = plain[stop] - plain[first] + table.recompute_s(first, stop, demand_of[stages - ranks_left])
            return work, work

        return smallest_bottleneck(unreplicated_problem(stages, plain, evaluate, fixed=partition),
                                   lambda: not _may_fit(table, demand_of))

    for attempt in _attempts(demands, shares):
        if (found := find(attempt)) is None:
            continue
        recomputed = tuple(table.recompute_set(each.first, each.stop, demand) or frozenset[int]()
                           for each, demand in zip(found.stages, attempt, strict=True))
        kept = kept_bytes(table.profile, found.partition, recomputed, placement)
        memory = [stage_memory(table.profile, range(each.first, each.stop), layers, demand.in_flight, demand.versions,
                               demand.weight_halves, width=demand.width,
                               waiting=demand.in_flight * (kept.waiting[stage] - kept.shared[stage]))
                  for stage, (each, demand, layers) in enumerate(zip(found.stages, demands, recomputed, strict=True))]
        if table.limit_bytes is not None and any(
                combined_memory([memory[stage] for stage in stages_of_rank(placement, rank)]).peak > table.limit_bytes
                for ranks in placement for rank in ranks[:1]):
            continue
        samples = choice.microbatches * table.profile.identity.microbatch_size
        return Candidate(choice, found.partition, recomputed, _estimate_s(table, choice, found) / samples)
    return None


def _may_fit(table: StageTable, demands: list[StageDemand]) -> bool:
    """Return whether there is a partition in which every stage has room for the least that it may hold.

    That is known much sooner than what the stages would recompute.
    """
    if table.limit_bytes is None or np.isinf(demands[0].part):
        return True

    def evaluate(ranks_left: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        demand = demands[len(demands) - ranks_left]
        return np.zeros(first.shape), table.least_bytes(first, stop, demand) / demand.part

    needed = smallest_bottleneck(unreplicated_problem(len(demands), table.floor_bytes, evaluate,
                                                    max(demand.part for demand in demands)))
    return needed is not None and needed.bottleneck <= table.limit_bytes * (1 + 1e-9)


def _attempts(demands: list[StageDemand], shares: Sequence[float] | float | None) -> Iterator[list[StageDemand]]:
    """Yield demands to try: without a limit, with each stage's part of it, at last with everything recomputed."""
    if shares is None:
        yield [demand._replace(share=0.0, part=np.inf) for demand in demands]
        yield demands
        shares = 1.0
    each = [shares] * len(demands) if isinstance(shares, (int, float)) else shares
    yield [demand._replace(share=share, part=np.inf) for demand, share in zip(demands, each, strict=True)]


def _demands(choice: Choice, profile: Profile) -> Iterator[StageDemand]:
    """Yield what every stage holds when its rank holds most, with its part of its rank's memory."""
    built = build(choice.schedule, choice.groups, choice.microbatches)
    costs = Costs((StageCosts(1, 1, 1),) * len(choice.groups))
    # The first microbatches are those of the first replica, which takes as many as any other.
    firsts = {ranks[0] for ranks in choice.groups}
    of_rank = {rank: peak_contents(built.programs[rank], built.stages_of(rank), costs) for rank in firsts}
    for stage, ranks in enumerate(choice.groups):
        held = {each: [of_rank[ranks[0]][value, each] for value in (SAVED, UPDATED, HALF)]
                for each in built.stages_of(ranks[0])}
        in_flight, versions, halves = held[stage]
        yield StageDemand(max(1, in_flight), versions, halves, part=sum(held[stage]) / sum(map(sum, held.values())),
                          width=profile.sharers(len(ranks)))


def _estimate_s(table: StageTable, choice: Choice, found: FoundPartition) -> float:
    """Estimate a step: the fullest rank is idle only while the pipeline fills and drains, in steps of one chunk."""
    width, groups = len(choice.groups[0]), len(set(map(frozenset, choice.groups)))  # of ranks with the same stages
    per_rank = found.bottleneck * len(stages_of_rank(choice.groups, choice.groups[0][0]))
    filling = 0.0 if choice.traits.split else (groups - 1) * found.bottleneck
    step = table.sums["step"][-1] / groups
    return float(choice.per_replica(width) * per_rank + filling + step)
