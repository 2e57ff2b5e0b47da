"""Compression of the tensors at the cuts of a sequential program, as a pipeline compresses what it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vpipe.model.layer import Model
from vpipe.model.split import split
from vpipe.runtime.transport.compression import Coder, Compression, decode
from vpipe.runtime.transport.transport import Key, Spec
from vpipe.schedules.size import Placement


class CutCompression:
    """Encodes and at once decodes the tensors and gradients that a pipeline would send between ranks.

    It uses the pipeline's coders, one per rank. Where both sides of a cut are on the same rank for a microbatch, its
    tensors are not compressed.

    Args:
        partition: layers per stage.
        placement: ranks per stage.
    """

    def __init__(self, model: Model, partition: Sequence[int], placement: Placement, compression: Compression) -> None:
        self._placement, self._compression = placement, compression
        self._cuts = {spec.layers.start: spec for spec in split(model, partition)[1:]}
        self._coders: dict[int, Coder] = defaultdict(lambda: Coder(compression))

    def __call__(self, number: int, microbatch: int, layer: int, tensors: dict[str, Tensor]) -> None:
        """Replace the inputs of a layer by what arrives after compression, if a cut lies before it.

        Args:
            number: of the microbatch in the run.
            microbatch: its number since the pipeline was empty, which decides the replicas that process it.
        """
        spec = self._cuts.get(layer)
        if spec is None:
            return
        sender, receiver = (ranks[microbatch % len(ranks)] for ranks in self._placement[spec.index - 1:spec.index + 1])
        if sender == receiver or self._compression.codecs[spec.index - 1] == "none":
            return
        before = [tensors[name] for name in spec.inputs]
        arrived = self.transfer(sender, Key("F", spec.index, number), before)
        wanting = [i for i, tensor in enumerate(before) if tensor.requires_grad]
        if wanting:
            key = Key("B", spec.index - 1, number)
            joined = _CompressedCut.apply(self, receiver, key, [arrived[i].detach() for i in wanting],  # type: ignore[no-untyped-call]
                                *(before[i] for i in wanting))
            for i, tensor in zip(wanting, joined, strict=True):
                arrived[i] = tensor
        tensors.update(zip(spec.inputs, arrived, strict=True))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return copies of the residuals of compressed gradients, by their names in a checkpoint."""
        return {f"feedback.{layer}.{replica}.{number}": lost.clone() for layer, replica, rank, cut in self._senders()
                for number, lost in self._coders[rank].lost(cut).items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the residuals that a checkpoint holds."""
        for layer, replica, rank, cut in self._senders():
            prefix = f"feedback.{layer}.{replica}."
            for name, lost in tensors.items():
                if name.startswith(prefix):
                    self._coders[rank].has_lost(cut, int(name.removeprefix(prefix)), lost)

    def _senders(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each sender of gradients: the layer behind the cut, the replica of its stage, its rank, and the cut."""
        for layer, spec in self._cuts.items():
            for replica, rank in enumerate(self._placement[spec.index]):
                yield layer, replica, rank, spec.index - 1

    def transfer(self, rank: int, key: Key, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what arrives when a rank sends these tensors."""
        codec = self._compression.codec(key)
        if codec is None:
            return list(tensors)
        return decode(codec, self._coders[rank].encode(key, tensors), [Spec.of(tensor) for tensor in tensors])


class _CompressedCut(torch.autograd.Function):
    """Replace tensors at a cut: forward by those that arrived; backward compresses all gradients of the cut at once."""

    @staticmethod
    def forward(ctx: Any, compression: CutCompression, rank: int, key: Key, arrived: Sequence[Tensor],
                *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.sender = compression, rank, key
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        compression, rank, key = ctx.sender
        return None, None, None, None, *compression.transfer(rank, key, [gradient.contiguous()
                                                                         for gradient in gradients])
