"""Which layers of a stage to recompute: every choice worth making, found layer by layer.

What a set of recomputed layers saves is no sum over its layers: runs of them share one input, and a tensor between two
dropped layers is not held at all. So choices are built from the first layer to the last. Of two that continue alike,
one that takes more seconds and more bytes than another is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.activation_memory import ActivationMemory
from vpipe.plan.profile import Profile

MOST_CHOICES = 64
"""RecomputeSets kept per end; beyond that they are thinned, evenly by their seconds."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerBytes:
    """A layer where it stands, as far as the bytes of a stage depend on it; equal ones stand for each other.

    Attributes:
        before: names of the tensors that are alive before the layer, with their bytes.
        after: names alive behind it.
        saved: bytes that its graph keeps besides named tensors.
        saves_in: tensors alive before it that its graph keeps.
        saves_out: tensors that it writes and its graph keeps, with their bytes.
        writes: names.
        recompute_s: its forward again.
    """

    before: tuple[tuple[str, int], ...]
    after: frozenset[str]
    saved: int
    saves_in: tuple[str, ...]
    saves_out: tuple[tuple[str, int], ...]
    writes: frozenset[str]
    recompute_s: float


def positions(profile: Profile, held: ActivationMemory) -> list[LayerBytes]:
    """Every layer of a profile where it stands."""
    found = []
    crossing = [held.crossing(cut) for cut in range(len(profile.layers) + 1)]
    for number, layer in enumerate(profile.layers):
        before = tuple((tensor.name, tensor.bytes) for tensor in crossing[number])
        sizes = {tensor.name: tensor.bytes for tensor in layer.writes}
        marks = [mark.partition(":")[::2] for mark in dict.fromkeys(layer.saves)]
        found.append(LayerBytes(
            before, frozenset(tensor.name for tensor in crossing[number + 1]), layer.saved_bytes,
            tuple(name for way, name in marks if way == "in" and name in dict(before)),
            tuple((name, sizes[name]) for way, name in marks if way == "out"),
            frozenset(sizes), layer.recompute.median))
    return found


class PrefixState(NamedTuple):
    """How a choice ends, as far as what follows depends on it.

    Attributes:
        dropped: whether its last layer is recomputed; None before the first.
        held: tensors alive here that are held already.
        again: those that the recomputation of the last run makes and keeps.
    """

    dropped: bool | None
    held: frozenset[str]
    again: frozenset[str]


START = PrefixState(None, frozenset(), frozenset())


@lru_cache(maxsize=1 << 14)
def turn(end: PrefixState, position: LayerBytes, drop: bool) -> tuple[PrefixState, int, int]:
    """One more layer, kept or dropped: how the choice ends then, and the bytes that it adds to a microbatch.

    Returns:
        The end; bytes while the dropped is dropped; bytes once it has been recomputed. As
        :class:`~vpipe.plan.activation_memory.ActivationMemory` counts them.
    """
    sizes, held, again, added = dict(position.before), end.held, end.again, 0
    if end.dropped is not drop:  # another run begins, and holds its inputs
        added = sum(size for name, size in position.before if name not in held)
        held, again = held.union(sizes), frozenset()
    counted = held | again if drop else held
    saved = position.saved + sum(sizes[name] for name in position.saves_in if name not in counted)
    saved += sum(size for _, size in position.saves_out)
    made = (counted.union(position.saves_in) - position.writes).union(name for name, _ in position.saves_out)
    if drop:
        held = held - position.writes
        following = PrefixState(True, held & position.after, (made - held) & position.after)
        return following, added, added + saved
    return PrefixState(False, made & position.after, frozenset()), added + saved, added + saved


@dataclass(frozen=True)
class RecomputeSets:
    """Sets of layers with one :class:`PrefixState`, the fastest first.

    Attributes:
        figures: per choice: bytes kept, bytes once recomputed, seconds of recomputing.
        chosen: per choice the layers as bits, the first of the stage the lowest; None where nobody asks.
    """

    figures: Floats
    chosen: Sequence[int] | None

    def with_layer(self, kept: int, full: int, seconds: float, bit: int) -> RecomputeSets:
        """Every choice and one more layer."""
        return RecomputeSets(self.figures + np.array([kept, full, seconds]),
                             None if self.chosen is None else [bits | bit for bits in self.chosen])


def merged(several: Sequence[RecomputeSets]) -> RecomputeSets:
    """All of them without those that another beats."""
    figures = np.concatenate([choices.figures for choices in several])
    order = np.lexsort((figures[:, 1], figures[:, 0], figures[:, 2]))
    kept, full = figures[order, 0], figures[order, 1]
    # In order, who beats another stands before it: not slower, and not larger.
    if full.min() == full.max():
        beaten = kept[1:] >= np.minimum.accumulate(kept)[:-1]
    else:
        beaten = np.triu((kept[:, None] <= kept) & (full[:, None] <= full), 1).any(axis=0)[1:]
    order = order[np.concatenate([[True], ~beaten])]
    if len(order) > MOST_CHOICES:
        order = order[np.linspace(0, len(order) - 1, MOST_CHOICES).round().astype(int)]
    chosen = None
    if several[0].chosen is not None:
        every = [bits for choices in several for bits in choices.chosen or ()]
        chosen = [every[number] for number in order]
    return RecomputeSets(figures[order], chosen)


SetsByState = Mapping[PrefixState, RecomputeSets]
"""All choices over some layers, by how they end."""


def opened(trace: bool = False) -> SetsByState:
    """The one choice before the first layer."""
    return {START: RecomputeSets(np.zeros((1, 3)), [0] if trace else None)}


def extended(fan: SetsByState, position: LayerBytes, number: int = 0) -> SetsByState:
    """The choices with one more layer, the ``number``-th of the stage."""
    parts: dict[PrefixState, list[RecomputeSets]] = {}
    for end, choices in fan.items():
        for drop in (False, True):
            following, kept, full = turn(end, position, drop)
            seconds, bit = (position.recompute_s, 1 << number) if drop else (0.0, 0)
            parts.setdefault(following, []).append(choices.with_layer(kept, full, seconds, bit))
    return {end: merged(several) for end, several in parts.items()}


def best_sets(own: Iterable[LayerBytes]) -> RecomputeSets:
    """The sets of layers of a stage, the fastest first, that may be the best for some number of microbatches and room.

    Args:
        own: the layers of the stage.
    """
    fan = opened(trace=True)
    for number, position in enumerate(own):
        fan = extended(fan, position, number)
    return merged(list(fan.values()))


def fitting_set(choices: RecomputeSets, first: int, in_flight: int, room: float) -> frozenset[int] | None:
    """The layers to recompute, numbered from ``first`` on, that take the least time; None where none fit.

    Args:
        in_flight: microbatches: all but one hold what is kept, one all of it.
        room: bytes for them.
    """
    fitting = choices.figures[:, 1] + (in_flight - 1) * choices.figures[:, 0] <= room
    if not fitting.any():
        return None
    assert choices.chosen is not None
    bits = choices.chosen[int(fitting.argmax())]
    return frozenset(first + number for number in range(bits.bit_length()) if bits >> number & 1)
