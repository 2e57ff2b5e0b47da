"""Which named tensors of a profile are alive where, and the bytes that a stage holds of a microbatch.

The counterpart of :mod:`vpipe.model.split` and of the record that the runtime keeps, without torch: from what a
profile says of every layer, so that a plan knows what a run will hold. Exact as far as the profile is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from vpipe.plan.profile import Profile, TensorBytes


class ActivationMemory:
    """What is held of a microbatch between its forward and its backward; all byte counts are of one microbatch.

    A tensor is known by its name and the layer that wrote it: a name that is written again is another tensor.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._sources: list[dict[str, tuple[int, TensorBytes]]] = []  # per layer: by name, who wrote what it would read
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
        """The tensors that cross the cut before layer ``cut``."""
        return [tensor for _, tensor in self._at(cut)]

    def output_bytes(self, cut: int) -> int:
        """What a microbatch sends forward through a cut."""
        return sum(tensor.bytes for tensor in self.crossing(cut))

    def gradient_bytes(self, cut: int) -> int:
        """What it sends back through it."""
        return sum(tensor.bytes for tensor in self.crossing(cut) if tensor.wants_gradient)

    def kept(self, layers: range, recomputed: Collection[int] = ()) -> int:
        """What a stage of ``layers`` keeps when the ``recomputed`` ones drop what they would save."""
        return self._bytes(layers, recomputed, dropped=True)

    def full(self, layers: range, recomputed: Collection[int] = ()) -> int:
        """What it holds once the dropped has been recomputed."""
        return self._bytes(layers, recomputed, dropped=False)

    def _at(self, cut: int) -> list[tuple[int, TensorBytes]]:
        return [self._sources[cut][name] for name in sorted(self._alive[cut])]

    def _bytes(self, layers: range, recomputed: Collection[int], dropped: bool) -> int:
        profile = self._profile
        read = {name for number in layers for name in profile.layers[number].reads}
        total = sum(size for name, size in profile.fields.items() if name in read)
        named: dict[tuple[int, str, int], int] = {}  # by writer, name, and the span that made it anew (-1: none)
        for span, again in _spans(layers, recomputed):
            for writer, tensor in self._at(span.start):
                named[writer, tensor.name, -1] = tensor.bytes
            if again and dropped:
                continue
            for number in span:
                total += profile.layers[number].saved_bytes
                for writer, tensor in self._saved(number):
                    named[writer, tensor.name, span.start if again and writer >= span.start else -1] = tensor.bytes
        return total + sum(named.values())

    def _saved(self, number: int) -> Iterator[tuple[int, TensorBytes]]:
        """The named tensors that a layer's graph keeps; not batch fields, which the record holds anyway."""
        layer = self._profile.layers[number]
        written = {tensor.name: tensor for tensor in layer.writes}
        for mark in layer.saves:
            way, _, name = mark.partition(":")
            if way == "out":
                yield number, written[name]
            elif name in self._sources[number]:
                yield self._sources[number][name]


def _spans(layers: range, recomputed: Collection[int]) -> Iterator[tuple[range, bool]]:
    """Maximal runs of layers that are kept, or dropped, together."""
    start = layers.start
    for number in layers:
        if number + 1 == layers.stop or (number in recomputed) != (number + 1 in recomputed):
            yield range(start, number + 1), number in recomputed
            start = number + 1
