"""Compress the tensors at the cuts of a sequential program, as a pipeline compresses its transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vpipe.model.model import Model
from vpipe.runtime.transport.compression import Compression, decode
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.size import Placement


class CutCompression:
    """Encode and at once decode the tensors and gradients that a pipeline would send between ranks.

    It uses the pipeline's codecs. Where both sides of a cut are on the same rank for a microbatch, its
    tensors are not compressed.

    Args:
        partition: layers per stage.
        placement: ranks per stage.
    """

    def __init__(self, model: Model, partition: Sequence[int], placement: Placement, compression: Compression) -> None:
        self._placement, self._compression = placement, compression
        self._cuts = {spec.layers.start: spec for spec in model.split(partition)[1:]}

    def __call__(self, number: int, microbatch: int, layer: int, tensors: dict[str, Tensor]) -> None:
        """Replace the inputs of a layer by their values after compression, if a cut lies before it.

        Args:
            number: of the microbatch in the run.
            microbatch: its number since the pipeline was empty, which decides the replicas that process it.
        """
        spec = self._cuts.get(layer)
        if spec is None:
            return
        sender, receiver = (ranks[Assignment.replica_of(microbatch, len(ranks))]
                            for ranks in self._placement[spec.index - 1:spec.index + 1])
        if sender == receiver or self._compression.codecs[spec.index - 1] == "none":
            return
        before = [tensors[name] for name in spec.inputs]
        arrived = self.transfer(TransferKey(TransferKind.ACTIVATIONS, spec.index, number), before)
        wanting = [i for i, tensor in enumerate(before) if tensor.requires_grad]
        if wanting:
            key = TransferKey(TransferKind.GRADIENTS, spec.index - 1, number)
            joined = _CompressedCut.apply(self, key, [arrived[i].detach() for i in wanting],  # type: ignore[no-untyped-call]
                                *(before[i] for i in wanting))
            for i, tensor in zip(wanting, joined, strict=True):
                arrived[i] = tensor
        tensors.update(zip(spec.inputs, arrived, strict=True))

    def transfer(self, key: TransferKey, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as they arrive."""
        codec = self._compression.codec(key)
        if codec is None:
            return list(tensors)
        specs = [TensorSpec.from_tensor(tensor) for tensor in tensors]
        return decode(codec, self._compression.encode(key, tensors), specs)


class _CompressedCut(torch.autograd.Function):
    """Replace tensors at a cut: forward by those that arrived; backward compresses all gradients of the cut at once."""

    @staticmethod
    def forward(ctx: Any, compression: CutCompression, key: TransferKey, arrived: Sequence[Tensor],
                *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.sender = compression, key
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        compression, key = ctx.sender
        return None, None, None, *compression.transfer(key, [gradient.contiguous() for gradient in gradients])
