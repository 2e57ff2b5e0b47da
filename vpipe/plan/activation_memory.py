"""Count the activations that a stage holds for a microbatch, from the named tensors and saved bytes of a profile.

The counterpart of :mod:`vpipe.model.split` and of the runtime's record of a microbatch, without torch. Exact as far as
the profile is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from vpipe.plan.profile import Profile, TensorBytes


class ActivationMemory:
    """The bytes that a microbatch holds between its forward and its backward, and sends through cuts.

    A tensor is identified by its name and the layer that wrote it: a name that is written again is another tensor.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._sources: list[dict[str, tuple[int, TensorBytes]]] = []  # per layer: writer and tensor of each name
        written: dict[str, tuple[int, TensorBytes]] = {}
        for number, layer in enumerate(profile.layers):
            self._sources.append(written)
            if layer.writes:
                written = {**written, **{tensor.name: (number, tensor) for tensor in layer.writes}}
        self._alive: list[frozenset[str]] = [frozenset()] * (len(profile.layers) + 1)
        for number in range(len(profile.layers) - 1, -1, -1):
            layer = profile.layers[number]
            later = self._alive[number + 1] - {tensor.name for tensor in layer.writes}
            self._alive[number] = later | {name for name in layer.reads if name in self._sources[number]}

    def crossing(self, cut: int) -> list[TensorBytes]:
        """Return the tensors that cross the cut before layer ``cut``."""
        return [tensor for _, tensor in self._alive_at(cut)]

    def output_bytes(self, cut: int) -> int:
        """Return the bytes that a microbatch sends forward through a cut."""
        return sum(tensor.bytes for tensor in self.crossing(cut))

    def gradient_bytes(self, cut: int) -> int:
        """Return the bytes that a microbatch sends back through a cut."""
        return sum(tensor.bytes for tensor in self.crossing(cut) if tensor.wants_gradient)

    def kept_bytes(self, layers: range, recomputed: Collection[int] = ()) -> int:
        """Return the bytes that a stage keeps when the ``recomputed`` layers drop what they would save."""
        return self._bytes(layers, recomputed, dropped=True)

    def full_bytes(self, layers: range, recomputed: Collection[int] = ()) -> int:
        """Return the bytes that a stage holds once dropped activations are recomputed."""
        return self._bytes(layers, recomputed, dropped=False)

    def _alive_at(self, cut: int) -> list[tuple[int, TensorBytes]]:
        return [self._sources[cut][name] for name in sorted(self._alive[cut])]

    def _bytes(self, layers: range, recomputed: Collection[int], dropped: bool) -> int:
        profile = self._profile
        read = {name for number in layers for name in profile.layers[number].reads}
        total = sum(size for name, size in profile.fields.items() if name in read)
        named: dict[tuple[int, str, int], int] = {}  # by writer, name, and the run that recomputed it (-1: none)
        for run, again in _runs(layers, recomputed):
            for writer, tensor in self._alive_at(run.start):
                named[writer, tensor.name, -1] = tensor.bytes
            if again and dropped:
                continue
            for number in run:
                total += profile.layers[number].saved_bytes
                for writer, tensor in self._saved(number):
                    named[writer, tensor.name, run.start if again and writer >= run.start else -1] = tensor.bytes
        return total + sum(named.values())

    def _saved(self, number: int) -> Iterator[tuple[int, TensorBytes]]:
        """Yield the named tensors that a layer's graph saves, without batch fields, which are held anyway."""
        layer = self._profile.layers[number]
        written = {tensor.name: tensor for tensor in layer.writes}
        for mark in layer.saves:
            way, _, name = mark.partition(":")
            if way == "out":
                yield number, written[name]
            elif name in self._sources[number]:
                yield self._sources[number][name]


def _runs(layers: range, recomputed: Collection[int]) -> Iterator[tuple[range, bool]]:
    """Yield maximal runs of layers that are all kept, or all recomputed."""
    start = layers.start
    for number in layers:
        if number + 1 == layers.stop or (number in recomputed) != (number + 1 in recomputed):
            yield range(start, number + 1), number in recomputed
            start = number + 1
