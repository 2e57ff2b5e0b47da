"""What consecutive layers would cost as a stage, for very many of them at once.

The same numbers as :func:`~vpipe.plan.stage_costs.stage_costs` and :func:`~vpipe.plan.stage_costs.stage_memory`. Times
are differences of running sums. Bytes are found layer by layer, once for all stages that begin with equal
layers, as those of most models do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.activation_memory import ActivationMemory
from vpipe.plan.profile import Profile
from vpipe.plan.solver.recompute_sets import (
    START,
    PrefixState,
    RecomputeSets,
    SetsByState,
    best_sets,
    extended,
    fitting_set,
    opened,
    positions,
    turn,
)
from vpipe.plan.stage_costs import step_working

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class StageDemand(NamedTuple):
    """What a stage holds at most, and what else is said of it.

    Attributes:
        in_flight: microbatches between forward and backward.
        versions: of the weights, the latest among them.
        weight_halves: microbatches between the halves of their backward.
        share: of its layers, from the end, that are recomputed; None where that is searched.
        part: of the memory of its rank that it may use.
    """

    in_flight: int
    versions: int
    weight_halves: int
    share: float | None = None
    part: float = 1.0


@dataclass
class _Node:
    """Some layers as a stage: bytes."""

    first: int
    layers: int
    parent: int
    kind: int
    weights: int = 0
    optimizer: int = 0
    working: int = 0
    halves: int = 0
    fields: frozenset[str] = frozenset()
    borrowed: dict[int, int] = field(default_factory=dict)
    keeping: tuple[PrefixState, int] = (START, 0)  # nothing recomputed: how that ends, and bytes of a microbatch
    dropping: tuple[PrefixState, int, int] = (START, 0, 0)  # everything: bytes kept, bytes once recomputed
    fan: SetsByState | None = None


class StageTable:
    """The stages that a profile can be cut into.

    Args:
        profile: of the model.
        limit_bytes: that a rank may hold; None is no limit.
        told: layers that must be recomputed, wherever they come to lie, and no others; None where that is searched or
            said by :attr:`StageDemand.share`.

    Attributes:
        layers: of the model.
        floor_bytes: running sum over layers of what a stage holds for each at least.
        forward_bytes, gradient_bytes: through every cut.
    """

    def __init__(self, profile: Profile, limit_bytes: int | None, told: frozenset[int] | None = None) -> None:
        self.profile, self.layers, self.limit_bytes, self._told = profile, len(profile.layers), limit_bytes, told
        self.held = ActivationMemory(profile)
        self._positions = positions(profile, self.held)
        kinds: dict[object, int] = {}
        self._kinds = [kinds.setdefault(self._kind(number), len(kinds)) for number in range(self.layers)]
        self._nodes = [_Node(0, 0, -1, -1, fan=opened())]
        self._children: dict[tuple[int, int], int] = {}
        self._ids = np.zeros((self.layers, self.layers + 1), np.int64)  # by first layer and number of layers
        self._reach = np.zeros(self.layers, int)
        self._seconds: dict[StageDemand, Floats] = {}  # of recomputing, by node
        self._sets: dict[int, RecomputeSets] = {}  # by node
        self._known = np.empty((0, 6))
        sums = {"forward": "forward", "backward": "backward", "input": "input_half", "weight": "weight_half",
                "step": "step"}
        self._sums = {name: _running([getattr(layer, key).median for layer in profile.layers])
                      for name, key in sums.items()}
        self.floor_bytes = _running([2 * layer.parameter_bytes + layer.optimizer_bytes + layer.saved_bytes
                                     for layer in profile.layers])
        self._parameters = _running([layer.parameter_bytes for layer in profile.layers])
        cuts = range(1, self.layers)
        self.forward_bytes = np.array([0, *map(self.held.output_bytes, cuts), 0], float)
        self.gradient_bytes = np.array([0, *map(self.held.gradient_bytes, cuts), 0], float)

    def _kind(self, number: int) -> object:
        """What equal layers have in common: everything that the bytes of a stage depend on."""
        layer = self.profile.layers[number]
        return (self._positions[number], layer.parameter_bytes, layer.optimizer_bytes, layer.weight_half_bytes,
                layer.working_bytes, frozenset(layer.reads).intersection(self.profile.fields),
                None if self._told is None else number in self._told, number if layer.tied else None)

    def running(self, what: str) -> Floats:
        """Running sums over the layers, of forward, backward, input, weight or step: seconds."""
        return self._sums[what]

    def parameter_bytes(self, first: Integers, stop: Integers) -> Floats:
        """Bytes of the stage's own parameters."""
        return self._parameters[stop] - self._parameters[first]

    def recompute_s(self, first: Integers, stop: Integers, hold: StageDemand) -> Floats:
        """The least seconds of recomputing per microbatch with which stages fit, infinite where none do.

        Args:
            first, stop: of each stage; arrays of one shape.
        """
        if self._told is None and hold.share == 0.0 and self._limit(hold) == np.inf:
            return np.zeros(first.shape)
        ids = self._ids_of(first.ravel(), stop.ravel())
        known = self._seconds.get(hold, np.empty(0))
        if len(known) < len(self._nodes):
            known = np.concatenate([known, np.full(len(self._nodes) - len(known), np.nan)])
            self._seconds[hold] = known
        if len(unknown := np.unique(ids[np.isnan(known[ids])])):
            known[unknown] = self._least(unknown, hold)
        return known[ids].reshape(first.shape)

    def least_bytes(self, first: Integers, stop: Integers, hold: StageDemand) -> Floats:
        """What stages hold at least, whatever they recompute where that is not told."""
        ids = self._ids_of(first.ravel(), stop.ravel())
        if self._told is None and hold.share in (None, 0.0):
            *rest, keeping, dropping = self._figures()[ids].T
            kept = keeping if hold.share == 0.0 else np.minimum(keeping, dropping)
            held: Floats = self._fixed(rest, hold) + keeping + (hold.in_flight - 1) * kept
            return held.reshape(first.shape)
        wanted, places = np.unique(ids, return_inverse=True)
        return np.array([float(self._told_bytes(self._nodes[number], hold)) for number in wanted.tolist()])[
            places].reshape(first.shape)

    def _told_bytes(self, node: _Node, hold: StageDemand) -> int:
        told = self.must(node.first, node.first + node.layers, hold)
        assert told is not None
        return self._peak(node, told, hold)

    @staticmethod
    def _fixed(rest: Sequence[Floats], hold: StageDemand) -> Floats:
        """Of the first :meth:`_figures`, what is there whatever is recomputed."""
        fixed, weights, halves, fields = rest
        return fixed + (hold.versions + 1) * weights + hold.weight_halves * halves + hold.in_flight * fields

    def peak_bytes(self, first: int, stop: int, hold: StageDemand, recomputed: frozenset[int]) -> int:
        """What a stage holds."""
        return self._peak(self._node_of(first, stop), recomputed, hold)

    def recomputed(self, first: int, stop: int, hold: StageDemand) -> frozenset[int] | None:
        """The layers that a stage recomputes when it takes :meth:`recompute_s`; None where it does not fit."""
        node = self._node_of(first, stop)
        told = self.must(first, stop, hold)
        if told is not None:
            return told if self._fits(node, told, hold) else None
        if self._fits(node, frozenset(), hold):
            return frozenset()
        number = self._number_of(first, stop)
        if number not in self._sets:
            self._sets[number] = best_sets(self._positions[first:stop])
        return fitting_set(self._sets[number], first, hold.in_flight, self._limit(hold) - self._rest(node, hold))

    def must(self, first: int, stop: int, hold: StageDemand) -> frozenset[int] | None:
        """The layers that a stage recomputes because it is told to; None where that is searched."""
        if self._told is not None:
            return self._told.intersection(range(first, stop))
        if hold.share is None:
            return None
        return frozenset(range(stop - int(hold.share * (stop - first)), stop))

    def _fits(self, node: _Node, recomputed: frozenset[int], hold: StageDemand) -> bool:
        return self._peak(node, recomputed, hold) <= self._limit(hold)

    def _limit(self, hold: StageDemand) -> float:
        return np.inf if self.limit_bytes is None else self.limit_bytes * hold.part

    def _peak(self, node: _Node, recomputed: frozenset[int], hold: StageDemand) -> int:
        if not recomputed:
            full = kept = node.keeping[1]
        elif len(recomputed) == node.layers:
            _, kept, full = node.dropping
        else:
            layers = range(node.first, node.first + node.layers)
            fields = sum(self.profile.fields[name] for name in node.fields)
            kept, full = (count(layers, recomputed) - fields for count in (self.held.kept, self.held.full))
        return self._rest(node, hold) + full + (hold.in_flight - 1) * kept

    def _number_of(self, first: int, stop: int) -> int:
        return int(self._ids_of(np.array([first]), np.array([stop]))[0])

    def _node_of(self, first: int, stop: int) -> _Node:
        return self._nodes[self._number_of(first, stop)]

    def _least(self, numbers: Integers, hold: StageDemand) -> Floats:
        """The least seconds of recomputing of some nodes."""
        if self._told is not None or hold.share is not None:
            return np.array([self._told_s(node, hold) for node in map(self._nodes.__getitem__, numbers.tolist())])
        *rest, keeping, dropping = self._figures()[numbers].T
        others, room = hold.in_flight - 1, self._limit(hold) - self._fixed(rest, hold)
        # No set keeps less than all layers do, or has less once recomputed than a stage that keeps everything.
        least = np.where((1 + others) * keeping <= room, 0.0,
                         np.where(others * dropping + keeping > room, np.inf, np.nan))
        for place in np.flatnonzero(np.isnan(least)).tolist():
            least[place] = self._least_of(self._fan(int(numbers[place])), others, float(room[place]))
        return least

    def _told_s(self, node: _Node, hold: StageDemand) -> float:
        told = self.must(node.first, node.first + node.layers, hold)
        assert told is not None
        if not self._fits(node, told, hold):
            return math.inf
        return sum(self._positions[layer].recompute_s for layer in sorted(told))

    def _least_of(self, fan: SetsByState, others: int, room: float) -> float:
        least = math.inf
        for choices in fan.values():
            kept, full, seconds = choices.figures.T
            fitting = full + others * kept <= room
            if fitting.any():
                least = min(least, float(seconds[int(fitting.argmax())]))
        return least

    def _figures(self) -> Floats:
        """Per node: bytes whatever is held, of a version of the weights, of halves, of fields, kept with everything
        kept, and with everything dropped."""
        done = len(self._known)
        if done < len(self._nodes):
            rows = [(node.optimizer + self._working(node), node.weights + sum(node.borrowed.values()), node.halves,
                     sum(self.profile.fields[name] for name in node.fields), node.keeping[1], node.dropping[1])
                    for node in self._nodes[done:]]
            self._known = np.concatenate([self._known, np.array(rows, float)])
        return self._known

    def _rest(self, node: _Node, hold: StageDemand) -> int:
        """Everything that is there whatever is recomputed."""
        weights = node.weights + sum(node.borrowed.values())
        return ((hold.versions + 1) * weights + node.optimizer + self._working(node) + hold.weight_halves * node.halves
                + sum(self.profile.fields[name] for name in node.fields) * hold.in_flight)

    def _working(self, node: _Node) -> int:
        return max(node.working, step_working(self.profile, node.weights))

    def _fan(self, number: int) -> SetsByState:
        chain = []
        while self._nodes[number].fan is None:
            chain.append(number)
            number = self._nodes[number].parent
        fan = self._nodes[number].fan
        assert fan is not None
        for number in reversed(chain):
            node = self._nodes[number]
            fan = node.fan = extended(fan, self._positions[node.first + node.layers - 1])
        return fan

    def _ids_of(self, first: Integers, stop: Integers) -> Integers:
        layers = stop - first
        if (new := layers > self._reach[first]).any():
            longest = np.zeros(self.layers, int)
            np.maximum.at(longest, first[new], layers[new])
            for start in np.flatnonzero(longest).tolist():
                self._extend(start, int(longest[start]))
        found: Integers = self._ids.ravel()[first * (self.layers + 1) + layers]
        return found

    def _extend(self, start: int, longest: int) -> None:
        row, reach = self._ids[start], int(self._reach[start])
        parent = int(row[reach])
        for layers in range(reach + 1, longest + 1):
            key = parent, self._kinds[start + layers - 1]
            number = self._children.get(key)
            if number is None:
                number = self._children[key] = len(self._nodes)
                self._nodes.append(self._node(parent, start, layers))
            row[layers] = parent = number
        self._reach[start] = longest

    def _node(self, parent: int, start: int, layers: int) -> _Node:
        number, before = start + layers - 1, self._nodes[parent]
        layer, position = self.profile.layers[number], self._positions[number]
        borrowed = before.borrowed
        if strange := {owner: size for owner, size in layer.tied.items() if not start <= owner <= number}:
            borrowed = {**borrowed, **{owner: max(size, borrowed.get(owner, 0)) for owner, size in strange.items()}}
        keeping, added, _ = turn(before.keeping[0], position, False)
        dropping, kept, full = turn(before.dropping[0], position, True)
        return _Node(
            start, layers, parent, self._kinds[number], before.weights + layer.parameter_bytes,
            before.optimizer + layer.optimizer_bytes, max(before.working, layer.working_bytes),
            before.halves + layer.weight_half_bytes, before.fields.union(layer.reads).intersection(self.profile.fields),
            borrowed, (keeping, before.keeping[1] + added),
            (dropping, before.dropping[1] + kept, before.dropping[2] + full))


def _running(numbers: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(numbers, float))])
