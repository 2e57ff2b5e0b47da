"""Tabulate the costs of consecutive layers as a stage, for very many stages at once.

The figures are those of :mod:`vpipe.plan.stage_costs`. Times are differences of running sums. Bytes are added up layer
by layer, once for all stages that begin with equal layers, as those of most models do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vpipe.plan.profile import START, LayerTensors, PrefixState, Profile, add_layer
from vpipe.plan.solver.partition_search import Floats, Integers, running_sum
from vpipe.plan.stage_costs import StageBytes

MOST_SETS = 64
"""Sets kept per state; of more, some are left out, evenly by their seconds."""


@dataclass(frozen=True)
class RecomputeSets:
    """Sets of layers of a stage to recompute that end in one state, the fastest first.

    The bytes that a set saves are no sum over its layers: consecutive recomputed layers share one input, and a tensor
    between two recomputed layers is not held at all. So sets are built from the first layer to the last, layer by
    layer. Of two sets that end in the same state, the one that takes more seconds and more bytes is dropped.
    """

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


class StageDemand(NamedTuple):
    """The most that a stage must hold, and the conditions that it must keep."""

    in_flight: int  # microbatches between forward and backward
    versions: int  # of the weights, the latest among them
    weight_halves: int  # microbatches between the halves of their backward
    share: float | None = None  # of its layers, from the end, that are recomputed; None where that is searched
    part: float = 1.0  # of the memory of its rank that it may use
    width: int = 1  # replicas, where they share the optimizer's state


@dataclass
class _Node:
    """The bytes of some consecutive layers as a stage."""

    number: int  # of the node
    first: int
    layers: int
    parent: int
    bytes: StageBytes = field(default_factory=StageBytes)
    fields: frozenset[str] = frozenset()
    keeping: tuple[PrefixState, int] = (START, 0)  # nothing recomputed: its state, and bytes of a microbatch
    dropping: tuple[PrefixState, int, int] = (START, 0, 0)  # everything: bytes kept, bytes once recomputed
    sets: SetsByState | None = None


class StageTable:
    """The stages that a profile can be cut into.

    Args:
        profile: of the model.
        limit_bytes: that a rank may hold; None is no limit.
        required: the layers that are recomputed, in whatever stage, and no others; None where that is searched or given
            by :attr:`StageDemand.share`.

    Attributes:
        layers: of the model.
        sums: running sums over layers of each of their times, such as ``weight_half``: seconds.
        floor_bytes: running sum over layers of the bytes that a stage holds for each at least.
        forward_bytes, gradient_bytes: through every cut.
    """

    def __init__(self, profile: Profile, limit_bytes: int | None, required: frozenset[int] | None = None) -> None:
        self.profile, self.layers = profile, len(profile.layers)
        self.limit_bytes, self._required = limit_bytes, required
        self._tensors = profile.activations.tensors
        kinds: dict[object, int] = {}
        self._kinds = [kinds.setdefault(self._kind(number), len(kinds)) for number in range(self.layers)]
        self._nodes = [_Node(0, 0, 0, -1, sets={START: RecomputeSets(np.zeros((1, 3)), [0])})]
        self._children: dict[tuple[int, int], int] = {}
        self._ids = np.zeros((self.layers, self.layers + 1), np.int64)  # by first layer and number of layers
        self._tabulated = np.zeros(self.layers, int)
        self._seconds: dict[StageDemand, Floats] = {}  # of recomputation, by node
        self._known: dict[int, Integers] = {}  # figures of the nodes, by width
        self.sums = {what: running_sum([getattr(layer, what).median for layer in profile.layers])
                      for what in ("forward", "backward", "input_half", "weight_half", "step")}
        self.floor_bytes = running_sum([2 * layer.parameter_bytes + layer.optimizer_bytes * (profile.sharers(2) == 1)
                                        + layer.frozen_bytes + layer.saved_bytes for layer in profile.layers])
        self._parameters = running_sum([layer.parameter_bytes for layer in profile.layers])
        cuts = range(1, self.layers)
        self.forward_bytes = np.array([0, *map(profile.activations.output_bytes, cuts), 0], float)
        self.gradient_bytes = np.array([0, *map(profile.activations.gradient_bytes, cuts), 0], float)

    def _kind(self, number: int) -> object:
        """Return everything of a layer that the bytes of a stage depend on; equal layers have the same."""
        layer = self.profile.layers[number]
        return (self._tensors[number], StageBytes().with_layer(layer, 0),
                frozenset(layer.reads).intersection(self.profile.fields),
                None if self._required is None else number in self._required,
                number if layer.tied or layer.frozen_tied else None)

    def work_s(self, split: bool) -> Floats:
        """Return the running sum over layers of the seconds of a microbatch, without recomputation."""
        parts = ("forward", "input_half", "weight_half") if split else ("forward", "backward")
        total: Floats = np.sum([self.sums[part] for part in parts], axis=0)
        return total

    def parameter_bytes(self, first: Integers, stop: Integers) -> Floats:
        """Return the bytes of the stages' own parameters."""
        return self._parameters[stop] - self._parameters[first]

    def recompute_s(self, first: Integers, stop: Integers, demand: StageDemand) -> Floats:
        """Return the least seconds of recomputation with which stages fit; infinite where none do.

        Args:
            first, stop: of each stage; arrays of one shape.
        """
        if self._required is None and demand.share == 0.0 and self._limit(demand) == np.inf:
            return np.zeros(first.shape)
        ids = self._ids_of(first.ravel(), stop.ravel())
        known = self._seconds.get(demand, np.empty(0))
        if len(known) < len(self._nodes):
            known = np.concatenate([known, np.full(len(self._nodes) - len(known), np.nan)])
            self._seconds[demand] = known
        if len(unknown := np.unique(ids[np.isnan(known[ids])])):
            known[unknown] = self._least_s(unknown, demand)
        return known[ids].reshape(first.shape)

    def least_bytes(self, first: Integers, stop: Integers, demand: StageDemand) -> Floats:
        """Return the least bytes that stages can hold, with any recomputation that is allowed."""
        ids = self._ids_of(first.ravel(), stop.ravel())
        if self._required is None and demand.share in (None, 0.0):
            *rest, keeping, dropping = self._figures(demand.width)[ids].T
            kept = keeping if demand.share == 0.0 else np.minimum(keeping, dropping)
            held: Floats = _fixed(rest, demand) + keeping + (demand.in_flight - 1) * kept
            return held.reshape(first.shape)
        wanted, places = np.unique(ids, return_inverse=True)
        return np.array([float(self._peak(node, self._required_of(node, demand) or frozenset(), demand))
                         for node in map(self._nodes.__getitem__, wanted.tolist())])[places].reshape(first.shape)

    def peak_bytes(self, first: int, stop: int, demand: StageDemand, recomputed: frozenset[int]) -> int:
        """Return what a stage holds at most."""
        node = self._node_of(first, stop)  # whose layers are equal to these, but may be others
        return self._peak(node, frozenset(number - first + node.first for number in recomputed), demand)

    def recompute_set(self, first: int, stop: int, demand: StageDemand) -> frozenset[int] | None:
        """Return the layers whose recomputation takes :meth:`recompute_s`; None where the stage does not fit."""
        node = self._node_of(first, stop)  # whose layers are equal to these, but may be others
        found = self._set_of(node, demand)
        return None if found is None else frozenset(number - node.first + first for number in found)

    def _set_of(self, node: _Node, demand: StageDemand) -> frozenset[int] | None:
        required = self._required_of(node, demand)
        chosen = required or frozenset()
        if self._peak(node, chosen, demand) <= self._limit(demand):
            return chosen
        seconds, bits = (math.inf, 0) if required is not None else self._fastest(node, demand)
        return None if seconds == math.inf else frozenset(
            node.first + number for number in range(node.layers) if bits >> number & 1)

    def _fastest(self, node: _Node, demand: StageDemand) -> tuple[float, int]:
        room = self._limit(demand) - _fixed(self._figures(demand.width)[node.number, :5], demand)
        return fastest_set(self._sets_of(node), demand.in_flight, room)

    def required(self, first: int, stop: int, demand: StageDemand) -> frozenset[int] | None:
        """Return the layers that a stage must recompute; None where that is searched."""
        if self._required is not None:
            return self._required.intersection(range(first, stop))
        if demand.share is None:
            return None
        return frozenset(range(stop - int(demand.share * (stop - first)), stop))

    def _required_of(self, node: _Node, demand: StageDemand) -> frozenset[int] | None:
        return self.required(node.first, node.first + node.layers, demand)

    def _limit(self, demand: StageDemand) -> float:
        return np.inf if self.limit_bytes is None else self.limit_bytes * demand.part

    def _peak(self, node: _Node, recomputed: frozenset[int], demand: StageDemand) -> int:
        figures = self._figures(demand.width)[node.number]
        if not recomputed:
            full = kept = node.keeping[1]
        elif len(recomputed) == node.layers:
            _, kept, full = node.dropping
        else:
            layers, fields = range(node.first, node.first + node.layers), figures[3]
            kept, full = (size - fields for size in self.profile.activations.held(layers, recomputed)[:2])
        return int(_fixed(figures[:5], demand) + full + (demand.in_flight - 1) * kept)

    def _least_s(self, numbers: Integers, demand: StageDemand) -> Floats:
        """Return the least seconds of recomputation of some nodes."""
        if self._required is not None or demand.share is not None:
            sets = [self._set_of(self._nodes[number], demand) for number in numbers.tolist()]
            return np.array([np.inf if layers is None else sum(
                self._tensors[layer].recompute_s for layer in sorted(layers)) for layers in sets], float)
        *rest, keeping, dropping = self._figures(demand.width)[numbers].T
        others, room = demand.in_flight - 1, self._limit(demand) - _fixed(rest, demand)
        # No set keeps less than all layers do, or has less once recomputed than a stage that keeps everything.
        least = np.where((1 + others) * keeping <= room, 0.0,
                         np.where(others * dropping + keeping > room, np.inf, np.nan))
        for place in np.flatnonzero(np.isnan(least)).tolist():
            least[place], _ = self._fastest(self._nodes[numbers[place]], demand)
        return least

    def _figures(self, width: int) -> Integers:
        """Return per node the bytes: fixed, of a weight version, of halves, of fields, of what versions add once,
        of a microbatch that keeps all, and of one that drops all."""
        known = self._known.get(width, np.empty((0, 7), np.int64))
        new = []
        for node in self._nodes[len(known):]:
            one, two = (node.bytes.memory(self.profile, versions, width).peak for versions in (1, 2))
            version = node.bytes.version
            new.append((
                one - 2 * version, version, node.bytes.halves, sum(self.profile.fields[name] for name in node.fields),
                two - one - version, node.keeping[1], node.dropping[1]))
        if new:
            known = self._known[width] = np.concatenate([known, np.array(new)])
        return known

    def _sets_of(self, node: _Node) -> SetsByState:
        chain = []
        while (sets := node.sets) is None:
            chain.append(node)
            node = self._nodes[node.parent]
        for node in reversed(chain):
            sets = node.sets = extended(sets, self._tensors[node.first + node.layers - 1], node.layers - 1)
        return sets

    def _node_of(self, first: int, stop: int) -> _Node:
        return self._nodes[int(self._ids_of(np.array([first]), np.array([stop]))[0])]

    def _ids_of(self, first: Integers, stop: Integers) -> Integers:
        layers = stop - first
        if (new := layers > self._tabulated[first]).any():
            longest = np.zeros(self.layers, int)
            np.maximum.at(longest, first[new], layers[new])
            for start in np.flatnonzero(longest).tolist():
                self._extend(start, int(longest[start]))
        found: Integers = self._ids.ravel()[first * (self.layers + 1) + layers]
        return found

    def _extend(self, start: int, longest: int) -> None:
        row, reach = self._ids[start], int(self._tabulated[start])
        parent = int(row[reach])
        for layers in range(reach + 1, longest + 1):
            key = parent, self._kinds[start + layers - 1]
            number = self._children.get(key)
            if number is None:
                number = self._children[key] = len(self._nodes)
                self._nodes.append(self._node(number, parent, start, layers))
            row[layers] = parent = number
        self._tabulated[start] = longest

    def _node(self, number: int, parent: int, start: int, layers: int) -> _Node:
        last, before = start + layers - 1, self._nodes[parent]
        layer, tensors = self.profile.layers[last], self._tensors[last]
        keeping, added, _ = add_layer(before.keeping[0], tensors, False)
        dropping, kept, full = add_layer(before.dropping[0], tensors, True)
        fields = before.fields.union(layer.reads).intersection(self.profile.fields)
        return _Node(number, start, layers, parent, before.bytes.with_layer(layer, start), fields,
                     (keeping, before.keeping[1] + added),
                     (dropping, before.dropping[1] + kept, before.dropping[2] + full))


def _fixed(figures: Iterable[Any], demand: StageDemand) -> Any:
    """Return the bytes that are there whatever is recomputed, from the first :meth:`StageTable._figures`."""
    fixed, weights, halves, fields, later = figures
    return (fixed + (demand.versions + 1) * weights + (demand.versions > 1) * later + demand.weight_halves * halves
            + demand.in_flight * fields)
