"""Find which layers of a stage to recompute: build every set worth considering, layer by layer.

The bytes that a set saves are no sum over its layers: consecutive recomputed layers share one input, and a tensor
between two recomputed layers is not held at all. So sets are built from the first layer to the last. Of two sets that
end in the same state, the one that takes more seconds and more bytes is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    # per set its layers as bits, the first layer of the stage lowest; None where nobody asks
    chosen: Sequence[int] | None

    def with_layer(self, kept: int, full: int, seconds: float, bit: int) -> RecomputeSets:
        """Return every set with one more layer."""
        return RecomputeSets(self.figures + np.array([kept, full, seconds]),
                             None if self.chosen is None else [bits | bit for bits in self.chosen])


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
    chosen = None
    if several[0].chosen is not None:
        every = [bits for sets in several for bits in sets.chosen or ()]
        chosen = [every[number] for number in order]
    return RecomputeSets(figures[order], chosen)


SetsByState = Mapping[PrefixState, RecomputeSets]
"""All sets over some layers, by the state in which they end."""


def empty_set(trace: bool = False) -> SetsByState:
    """Return the one set before the first layer; ``trace``: with the layers of every set that is built from it."""
    return {START: RecomputeSets(np.zeros((1, 3)), [0] if trace else None)}


def extended(sets: SetsByState, layer: LayerTensors, number: int = 0) -> SetsByState:
    """Return the sets with one more layer, the ``number``-th of the stage."""
    parts: dict[PrefixState, list[RecomputeSets]] = {}
    for state, of_state in sets.items():
        for recompute in (False, True):
            following, kept, full = add_layer(state, layer, recompute)
            seconds, bit = (layer.recompute_s, 1 << number) if recompute else (0.0, 0)
            parts.setdefault(following, []).append(of_state.with_layer(kept, full, seconds, bit))
    return {state: merged(several) for state, several in parts.items()}


def traced_sets(layers: Iterable[LayerTensors]) -> SetsByState:
    """Return the sets of a stage's layers, with the layers of each."""
    sets = empty_set(trace=True)
    for number, layer in enumerate(layers):
        sets = extended(sets, layer, number)
    return sets


def fastest_set(sets: SetsByState, in_flight: int, room: float) -> tuple[float, int]:
    """Return the least seconds of a set that fits, infinite where none does, and its layers as bits where traced.

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
                best, chosen = figures, 0 if of_state.chosen is None else of_state.chosen[place]
    return best[0], chosen
