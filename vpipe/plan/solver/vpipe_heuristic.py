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
from itertools import accumulate

import numpy as np

from vpipe.plan.solver.cost_model import CostModel
from vpipe.plan.solver.stage_table import StageDemand, StageTable

StageCost = tuple[float, float]
"""Bytes that a stage holds too many, then its seconds per microbatch, which count where the first are equal."""


def balanced(costs: CostModel, stages: int) -> tuple[tuple[int, ...], tuple[frozenset[int], ...], float] | None:
    """Balance a partition into stages on one rank each.

    Returns:
        The partition, its recomputed layers, and the seconds of a step with a flush, or of a microbatch without; None
        where the heuristic ends with a stage that does not fit.
    """
    layers = costs.table.layers
    if stages > layers:
        return None
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    stops = list(accumulate(sizes))
    of_stage = [_cost(costs, stops, stage) for stage in range(stages)]
    for _ in range(layers * stages):
        slowest = max(range(stages), key=of_stage.__getitem__)
        for moved, other in _moves(stops, slowest):
            after = {stage: _cost(costs, moved, stage) for stage in (slowest, other)}
            if max(after.values()) < of_stage[slowest]:
                stops = moved
                for stage, cost in after.items():
                    of_stage[stage] = cost
                break
        else:
            break
    if any(excess for excess, _ in of_stage):
        return None
    firsts = [0, *stops[:-1]]
    sets = tuple(_recomputed(costs.table, first, stop, costs.demand(stages - stage, 1))
                 for stage, (first, stop) in enumerate(zip(firsts, stops, strict=True)))
    times, choice = [seconds for _, seconds in of_stage], costs.choice
    seconds = sum(times) + (choice.microbatches - 1) * max(times) if choice.flush else max(times)
    return tuple(stop - first for first, stop in zip(firsts, stops, strict=True)), sets, seconds


def _moves(stops: Sequence[int], stage: int) -> Iterator[tuple[list[int], int]]:
    """Yield the partitions after a layer moved from a stage to a neighbour, with the neighbour."""
    first = stops[stage - 1] if stage else 0
    if stops[stage] - first < 2:
        return
    if stage:
        yield [stop + (number == stage - 1) for number, stop in enumerate(stops)], stage - 1
    if stage + 1 < len(stops):
        yield [stop - (number == stage) for number, stop in enumerate(stops)], stage + 1


def _cost(costs: CostModel, stops: Sequence[int], stage: int) -> StageCost:
    first, stop = stops[stage - 1] if stage else 0, stops[stage]
    table, demand = costs.table, costs.demand(len(stops) - stage, 1)
    recomputed = _recomputed(table, first, stop, demand)
    excess = 0.0
    if table.limit_bytes is not None:
        excess = max(0.0, table.peak_bytes(first, stop, demand, recomputed) - table.limit_bytes)
    again = sum(table.profile.layers[layer].recompute.median for layer in recomputed)
    return excess, float(costs.plain_s(np.array([first]), np.array([stop]))[0]) + again


def _recomputed(table: StageTable, first: int, stop: int, demand: StageDemand) -> frozenset[int]:
    """Return the fewest layers that make the stage fit, first those that free the most bytes per second, or all."""
    if (required := table.required(first, stop, demand)) is not None:
        return required
    layers = table.profile.layers
    order = sorted(range(first, stop), key=lambda number: -layers[number].saved_bytes
                   / max(layers[number].recompute.median, 1e-12))
    recomputed: frozenset[int] = frozenset()
    for number in order:
        if table.limit_bytes is None or table.peak_bytes(first, stop, demand, recomputed) <= table.limit_bytes:
            break
        recomputed |= {number}
    return recomputed
