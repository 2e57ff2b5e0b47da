"""Find which layers of a stage to recompute: build every set worth considering, layer by layer.

The bytes that a set saves are no sum over its layers: consecutive recomputed layers share one input, and a tensor
between two recomputed layers is not held at all. So sets are built from the first layer to the last. Of two sets that
end in the same state, the one that takes more seconds and more bytes is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vpipe.plan.profile import START, LayerTensors, PrefixState, add_layer
from vpipe.plan.solver.partition_search import Floats

MOST_SETS = 64
"""Sets kept per state; of more, some are left out, evenly by their seconds."""


@dataclass(frozen=True)
class RecomputeSets:
    """Sets of layers that end in one state, the fastest first."""

    figures: Floats  # per set: bytes kept, bytes once recomputed, seconds of recomputation
    chosen: Sequence[int]  # per set its layers as bits, the first layer of the stage lowest


def merged(several: Sequence[RecomputeSets]) -> RecomputeSets:
    """Return all sets that no other beats."""
    figures = np.concatenate([sets.figures for sets in several])
    order = np.lexsort((figures[:, 1], figures[:, 0], figures[:, 2]))
    kept, full = figures[order, 0], figures[order, 1]
    # A set can only be beaten by one before it in the order, which is not slower, and only if that is not larger.
    if full.min() == full.max():
        beaten = kept[1:] >= np.minimum.accumulate(kept)[:-1]
    else:
        beaten = np.triu((kept[:, None] <= kept) & (full[:, None] <= full), 1).any(axis=0)[1:]
    order = order[np.concatenate([[True], ~beaten])]
    if len(order) > MOST_SETS:
        order = order[np.linspace(0, len(order) - 1, MOST_SETS).round().astype(int)]
    every = [bits for sets in several for bits in sets.chosen]
    return RecomputeSets(figures[order], [every[number] for number in order])


SetsByState = Mapping[PrefixState, RecomputeSets]
"""All sets over some layers, by the state in which they end."""


EMPTY_SET: SetsByState = {START: RecomputeSets(np.zeros((1, 3)), [0])}
"""The one set before the first layer."""


def extended(sets: SetsByState, layer: LayerTensors, number: int) -> SetsByState:
    """Return the sets with one more layer, the ``number``-th of the stage."""
    parts: dict[PrefixState, list[RecomputeSets]] = {}
    for state, of_state in sets.items():
        for recompute in (False, True):
            following, kept, full = add_layer(state, layer, recompute)
            seconds, bit = (layer.recompute_s, 1 << number) if recompute else (0.0, 0)
            parts.setdefault(following, []).append(RecomputeSets(
                of_state.figures + np.array([kept, full, seconds]), [bits | bit for bits in of_state.chosen]))
    return {state: merged(several) for state, several in parts.items()}


def fastest_set(sets: SetsByState, in_flight: int, room: float) -> tuple[float, int]:
    """Return the least seconds of a set that fits, infinite where none does, and its layers as bits.

    Args:
        in_flight: microbatches: all but one hold their kept bytes, one all of its bytes.
        room: bytes for them.
    """
    best, chosen = (math.inf, math.inf, math.inf), 0
    for of_state in sets.values():
        kept, full, seconds = of_state.figures.T
        fitting = full + (in_flight - 1) * kept <= room
        if fitting.any():
            place = int(fitting.argmax())
            figures = float(seconds[place]), float(kept[place]), float(full[place])
            if figures < best:
                best, chosen = figures, of_state.chosen[place]
    return best[0], chosen
