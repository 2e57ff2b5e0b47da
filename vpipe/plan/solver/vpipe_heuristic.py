"""The heuristic of the VPipe paper, for comparison: layers move between neighbours until no move helps.

Source: Zhao et al., vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable Pipeline Parallel DNN
Training (IEEE TPDS 33(3), 2022, doi:10.1109/TPDS.2021.3094364), the search for a plan of swapping, recomputing and
partitioning (SRP). It begins with equally many layers per stage. Each stage fits itself into its memory, layer by
layer, those first that free the most bytes per second. Then the slowest stage gives a layer at its edge to a neighbour,
for as long as the slower of the two becomes faster.

What differs: there is nothing to swap to, so that layers are recomputed only; and what is recomputed counts with the
bytes that this runtime holds then, which is why a layer in the middle of a stage may free less than it seems to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from vpipe.plan.solver.cost_model import CostModel
from vpipe.plan.solver.stage_table import StageDemand, StageTable

Cost = tuple[float, float]
"""Of a stage: bytes that it holds too many, then its seconds per microbatch, which count where the first are equal."""


Moved = tuple[tuple[int, ...], tuple[frozenset[int], ...], float]
"""A partition, what it recomputes, and the seconds of a step with a flush, or of a microbatch without."""


def balanced(formula: CostModel, stages: int) -> Moved | None:
    """A partition into stages on one rank each; None where the heuristic ends with a stage that does not fit."""
    layers = formula.spans.layers
    if stages > layers:
        return None
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    stops = list(accumulate(sizes))
    costs = [_cost(formula, stops, stage) for stage in range(stages)]
    for _ in range(layers * stages):
        slowest = max(range(stages), key=costs.__getitem__)
        for moved, other in _moves(stops, slowest):
            after = {stage: _cost(formula, moved, stage) for stage in (slowest, other)}
            if max(after.values()) < costs[slowest]:
                stops = moved
                for stage, cost in after.items():
                    costs[stage] = cost
                break
        else:
            break
    if any(over for over, _ in costs):
        return None
    firsts = [0, *stops[:-1]]
    sets = tuple(_recomputed(formula.spans, first, stop, formula.demand(stages - stage, 1))
                 for stage, (first, stop) in enumerate(zip(firsts, stops, strict=True)))
    times, form = [seconds for _, seconds in costs], formula.form
    seconds = sum(times) + (form.microbatches - 1) * max(times) if form.flush else max(times)
    return tuple(stop - first for first, stop in zip(firsts, stops, strict=True)), sets, seconds


def _moves(stops: Sequence[int], stage: int) -> Iterator[tuple[list[int], int]]:
    """A layer from a stage to a neighbour: the partition then, and the neighbour."""
    first = stops[stage - 1] if stage else 0
    if stops[stage] - first < 2:
        return
    if stage:
        yield [stop + (number == stage - 1) for number, stop in enumerate(stops)], stage - 1
    if stage + 1 < len(stops):
        yield [stop - (number == stage) for number, stop in enumerate(stops)], stage + 1


def _cost(formula: CostModel, stops: Sequence[int], stage: int) -> Cost:
    first, stop = stops[stage - 1] if stage else 0, stops[stage]
    spans, hold = formula.spans, formula.demand(len(stops) - stage, 1)
    dropped = _recomputed(spans, first, stop, hold)
    over = 0.0
    if spans.limit_bytes is not None:
        over = max(0.0, spans.peak_bytes(first, stop, hold, dropped) - spans.limit_bytes)
    again = sum(spans.profile.layers[layer].recompute.median for layer in dropped)
    return over, float(formula.plain_s(np.array([first]), np.array([stop]))[0]) + again


def _recomputed(spans: StageTable, first: int, stop: int, hold: StageDemand) -> frozenset[int]:
    """As few layers as make the stage fit, those first that free the most bytes per second; all where none do."""
    if (told := spans.must(first, stop, hold)) is not None:
        return told
    layers = spans.profile.layers
    order = sorted(range(first, stop), key=lambda number: -layers[number].saved_bytes
                   / max(layers[number].recompute.median, 1e-12))
    dropped: frozenset[int] = frozenset()
    for number in order:
        if spans.limit_bytes is None or spans.peak_bytes(first, stop, hold, dropped) <= spans.limit_bytes:
            break
        dropped |= {number}
    return dropped
