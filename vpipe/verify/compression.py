"""What compression does to the tensors between stages, for a sequential program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vpipe.model.layer import Model
from vpipe.model.split import split
from vpipe.runtime.compress import Coder, Compression, decode
from vpipe.runtime.transport import Key, Spec
from vpipe.schedules.size import Placement


class Crossing:
    """Codes and decodes at once what a pipeline would send from rank to rank, gradients included.

    It shares the coders with the pipeline and keeps one per rank, as the pipeline does. Where both sides of a cut are
    on the same rank for a microbatch, its tensors pass as they are.

    Args:
        partition: layers per stage.
        placement: ranks per stage.
    """

    def __init__(self, model: Model, partition: Sequence[int], placement: Placement, compression: Compression) -> None:
        self._placement, self._compression = placement, compression
        self._cuts = {spec.layers.start: spec for spec in split(model, partition)[1:]}
        self._coders: dict[int, Coder] = defaultdict(lambda: Coder(compression))

    def __call__(self, number: int, microbatch: int, layer: int, tensors: dict[str, Tensor]) -> None:
        """Before a layer runs: put in place of ``tensors`` what arrives at it, if a cut lies there.

        Args:
            number: of the microbatch in the run.
            microbatch: its number since the pipeline was empty, which decides the replicas that it goes through.
        """
        spec = self._cuts.get(layer)
        if spec is None:
            return
        sender, receiver = (ranks[microbatch % len(ranks)] for ranks in self._placement[spec.index - 1:spec.index + 1])
        if sender == receiver or self._compression.codecs[spec.index - 1] == "none":
            return
        before = [tensors[name] for name in spec.inputs]
        arrived = self.carry(sender, Key("F", spec.index, number), before)
        wanting = [i for i, tensor in enumerate(before) if tensor.requires_grad]
        if wanting:
            key = Key("B", spec.index - 1, number)
            joined = _Cut.apply(self, receiver, key, [arrived[i].detach() for i in wanting],  # type: ignore[no-untyped-call]
                                *(before[i] for i in wanting))
            for i, tensor in zip(wanting, joined, strict=True):
                arrived[i] = tensor
        tensors.update(zip(spec.inputs, arrived, strict=True))

    def kept(self) -> dict[str, Tensor]:
        """What coding gradients has lost so far, by its names in a checkpoint; copies."""
        return {f"feedback.{layer}.{replica}.{number}": lost.clone() for layer, replica, rank, cut in self._senders()
                for number, lost in self._coders[rank].lost(cut).items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what a checkpoint holds of it."""
        for layer, replica, rank, cut in self._senders():
            prefix = f"feedback.{layer}.{replica}."
            for name, lost in tensors.items():
                if name.startswith(prefix):
                    self._coders[rank].has_lost(cut, int(name.removeprefix(prefix)), lost)

    def _senders(self) -> Iterator[tuple[int, int, int, int]]:
        """Who sends gradients through a cut: the layer behind it, the replica of that stage, its rank; the cut."""
        for layer, spec in self._cuts.items():
            for replica, rank in enumerate(self._placement[spec.index]):
                yield layer, replica, rank, spec.index - 1

    def carry(self, rank: int, key: Key, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What arrives when a rank sends these tensors."""
        codec = self._compression.codec(key)
        if codec is None:
            return list(tensors)
        return decode(codec, self._coders[rank].encode(key, tensors), [Spec.of(tensor) for tensor in tensors])


class _Cut(torch.autograd.Function):
    """Forward gives what arrived, backward what comes back: all gradients of a cut at once, zeros where it has none."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, rank: int, key: Key, arrived: Sequence[Tensor],
                *left: Tensor) -> tuple[Tensor, ...]:
        ctx.returning = crossing, rank, key
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        crossing, rank, key = ctx.returning
        return None, None, None, None, *crossing.carry(rank, key, [gradient.contiguous() for gradient in gradients])
