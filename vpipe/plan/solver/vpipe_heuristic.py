"""The heuristic of the VPipe paper, for comparison: layers move between neighbours until no move helps.

Source: Zhao et al., vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable Pipeline Parallel DNN
Training (IEEE TPDS 33(3), 2022, doi:10.1109/TPDS.2021.3094364), the search for a plan of swapping, recomputing and
partitioning (SRP). It begins with equally many layers per stage. Each stage fits itself into its memory, layer by
layer, first those that free the most bytes per second. Then the slowest stage gives a layer at its edge to a neighbour,
as long as the slower of the two becomes faster.

Here nothing can be swapped, so layers are only recomputed. A recomputed layer counts with the bytes that this runtime
then holds, so a layer in the middle of a stage may free less than its activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vpipe.description.cut import ranges
from vpipe.plan.solver.choice import Candidate
from vpipe.plan.solver.cost_model import CostModel
from vpipe.plan.solver.stage_table import StageDemand, StageTable


def balanced_candidate(costs: CostModel) -> Candidate | None:
    """Return a candidate for a choice of stages on one rank each; None where the heuristic ends with a stage that does
    not fit."""
    layers, choice, stages = costs.table.layers, costs.choice, costs.choice.ranks
    if stages > layers:
        return None
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    of_stage = [_cost(costs, sizes, stage) for stage in range(stages)]
    for _ in range(layers * stages):
        slowest = max(range(stages), key=of_stage.__getitem__)
        for moved, other in _moves(sizes, slowest):
            after = {stage: _cost(costs, moved, stage) for stage in (slowest, other)}
            if max(after.values()) < of_stage[slowest]:
                sizes = moved
                for stage, cost in after.items():
                    of_stage[stage] = cost
                break
        else:
            break
    if any(excess for excess, _ in of_stage):
        return None
    sets = tuple(_recomputed(costs.table, here, costs.demand(stages - stage, 1))
                 for stage, here in enumerate(ranges(sizes)))
    times = [seconds for _, seconds in of_stage]
    seconds = sum(times) + (choice.microbatches - 1) * max(times) if choice.flush else max(times)
    return Candidate(choice, tuple(sizes), sets, costs.seconds_per_sample(seconds))


def _moves(sizes: Sequence[int], stage: int) -> Iterator[tuple[list[int], int]]:
    """Yield the partitions after a layer moved from a stage to a neighbour, with the neighbour."""
    for neighbour in (stage - 1, stage + 1):
        if sizes[stage] > 1 and 0 <= neighbour < len(sizes):
            moved = list(sizes)
            moved[stage] -= 1
            moved[neighbour] += 1
            yield moved, neighbour


def _cost(costs: CostModel, sizes: Sequence[int], stage: int) -> tuple[float, float]:
    """Return the bytes that a stage holds too many, and its seconds per microbatch, which count among equal bytes."""
    here, table, demand = ranges(sizes)[stage], costs.table, costs.demand(len(sizes) - stage, 1)
    recomputed = _recomputed(table, here, demand)
    excess = 0.0
    if table.limit_bytes is not None:
        excess = max(0.0, table.peak_bytes(here.start, here.stop, demand, recomputed) - table.limit_bytes)
    again = sum(table.profile.layers[layer].recompute.median for layer in recomputed)
    return excess, float(costs.plain_s(np.array([here.start]), np.array([here.stop]))[0]) + again


def _recomputed(table: StageTable, here: range, demand: StageDemand) -> frozenset[int]:
    """Return the fewest layers that make the stage fit, first those that free the most bytes per second, or all."""
    if (required := table.required(here.start, here.stop, demand)) is not None:
        return required
    layers = table.profile.layers
    order = sorted(here, key=lambda number: -layers[number].saved_bytes / max(layers[number].recompute.median, 1e-12))
    recomputed: frozenset[int] = frozenset()
    for number in order:
        if table.limit_bytes is None or (
                table.peak_bytes(here.start, here.stop, demand, recomputed) <= table.limit_bytes):
            break
        recomputed |= {number}
    return recomputed
