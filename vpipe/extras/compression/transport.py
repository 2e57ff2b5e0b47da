"""Compress tensors between stages: codecs, and a transport that encodes and decodes.

``bf16`` rounds to 16 bits. ``int8`` gives every row (the last dimension) a scale, its largest magnitude over 127, and
every number a byte. A tensor that would not get smaller, or is not floating, is sent unchanged. With ``int8`` a row
that holds a NaN or an infinity arrives as NaN throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vpipe.runtime import transport

TensorSpec = transport.TensorSpec
TransferKey = transport.TransferKey
_ACTIVATIONS, _GRADIENTS = transport.TransferKind.ACTIVATIONS, transport.TransferKind.GRADIENTS

SCALE_BYTES = 4
LARGEST = 127
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""The least scale of a row: a smaller one has no exact inverse. Numbers under half of it (6e-39) become 0."""
CACHED = 2**17
"""Elements that a CPU encodes at once, so that intermediate values stay in its cache."""


class Bf16:
    """16 bits per number, rounded to the nearest: 8 bits of exponent, 8 significant ones."""

    def wire(self, spec: TensorSpec) -> TensorSpec | None:
        """Return the spec of the encoded tensor; None where encoding saves nothing and the tensor itself is sent."""
        return _if_smaller(TensorSpec(spec.shape, torch.bfloat16, wants_gradient=False), spec)

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        """Return the encoded tensor, in memory of its own; ``seed`` is that of stochastic rounding."""
        return tensor.detach().to(torch.bfloat16, memory_format=torch.contiguous_format)

    def decode(self, wire: Tensor, spec: TensorSpec) -> Tensor:
        """Return the tensor with that spec, in memory of its own; a leaf that requires a gradient if it wants one."""
        return wire.to(spec.dtype).requires_grad_(spec.wants_gradient)


class Int8:
    """A byte per number and four per row; the methods are those of :class:`Bf16`.

    The encoded tensor has bytes, in rows four longer than the original's. In its memory the scales (fp32) of all rows
    come first, then the codes -127..127 (int8) of all of them. The error of a number is at most half a scale,
    stochastically rounded one scale, with mean 0.

    Args:
        stochastic: round up with a probability of the distance to the number below, in steps of 1/256.
    """

    def __init__(self, stochastic: bool) -> None:
        self._stochastic = stochastic

    def wire(self, spec: TensorSpec) -> TensorSpec | None:
        if not spec.shape:
            return None
        *outer, row = spec.shape
        return _if_smaller(TensorSpec((*outer, row + SCALE_BYTES), torch.uint8, wants_gradient=False), spec)

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        *outer, row = tensor.shape
        wire = torch.empty((*outer, row + SCALE_BYTES), dtype=torch.uint8, device=tensor.device)
        values, (scales, codes) = tensor.detach().reshape(-1, row), _parts(wire)
        generator = torch.Generator(tensor.device).manual_seed(seed) if self._stochastic else None
        rows = max(1, CACHED // row) if tensor.device.type == "cpu" else len(values)
        for start in range(0, len(values), rows):
            part = slice(start, start + rows)
            self._encode(values[part], scales[part], codes[part], generator)
        return wire

    def _encode(self, values: Tensor, scales: Tensor, codes: Tensor, generator: torch.Generator | None) -> None:
        """Fill in the scales ``[rows, 1]`` and codes ``[rows, row]`` of some rows."""
        values = values.float()
        steps = values.abs()
        torch.amax(steps, -1, keepdim=True, out=scales)
        scales.mul_(1 / LARGEST)
        scales += scales - scales  # inf becomes NaN, as NaN is
        inverse = scales.clamp_min_(LEAST_SCALE).reciprocal()
        if generator is None:
            codes.copy_(torch.mul(values, inverse, out=steps).round_())
            return
        torch.mul(values, inverse.mul_(256), out=steps)
        # |steps| <= 127 * 256, so with 255 more it still is within 16 bits; the shift rounds down.
        codes.copy_(steps.round_().to(torch.int16).add_(_noise(values, generator)).bitwise_right_shift_(8))

    def decode(self, wire: Tensor, spec: TensorSpec) -> Tensor:
        scales, codes = _parts(wire)
        return codes.float().mul_(scales).view(spec.shape).to(spec.dtype).requires_grad_(spec.wants_gradient)


def _if_smaller(wire: TensorSpec, spec: TensorSpec) -> TensorSpec | None:
    smaller = prod(wire.shape) * wire.dtype.itemsize < prod(spec.shape) * spec.dtype.itemsize
    return wire if spec.dtype.is_floating_point and smaller else None


def _parts(wire: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales ``[rows, 1]`` fp32 and the codes ``[rows, row]`` int8 in the memory of an encoded tensor."""
    row = wire.shape[-1] - SCALE_BYTES
    rows = wire.numel() // wire.shape[-1]
    memory = wire.view(-1)
    scales = memory[:rows * SCALE_BYTES].view(torch.float32).view(rows, 1)
    return scales, memory[rows * SCALE_BYTES:].view(torch.int8).view(rows, row)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random byte for every element."""
    words = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    return words.random_(-2**63, None, generator=generator).view(torch.uint8)[:like.numel()].view(like.shape)


class CompressedTransport:
    """Encode activations and gradients on sending, decode them on receiving. Receives are posted by the specs of the
    decoded tensors.

    Args:
        inner: which carries them.
        codecs: a name of ``vpipe.description.transfers.CODECS`` per cut, the same on every rank; cut c lies between the
            stages c and c + 1.
        seed: the run's seed.
    """

    needs_specs = True

    def __init__(self, inner: Any, codecs: Sequence[str], seed: int) -> None:
        self.rank, self.ordered = inner.rank, inner.ordered
        self._inner, self._seed = inner, seed
        self._codecs = [None if name == "none" else Bf16() if name == "bf16" else Int8(name == "int8_stochastic")
                        for name in codecs]
        self._expected: dict[tuple[int, TransferKey], Sequence[TensorSpec]] = {}  # of encoded transfers

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor]) -> None:
        codec = self._codec(key)
        self._inner.send(peer, key, tensors if codec is None else [
            tensor if codec.wire(TensorSpec.from_tensor(tensor)) is None else
            codec.encode(tensor, transport.seed_of(self._seed, key.number, cut_of(key), int(key.kind == _GRADIENTS), i))
            for i, tensor in enumerate(tensors)])

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec]) -> None:
        if (codec := self._codec(key)) is not None:
            self._expected[peer, key] = specs
            specs = [codec.wire(spec) or spec for spec in specs]
        self._inner.post(peer, key, specs)

    def receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        tensors: list[Tensor] = self._inner.receive(peer, key)
        if (codec := self._codec(key)) is None:
            return tensors
        return [tensor if codec.wire(spec) is None else codec.decode(tensor, spec)
                for tensor, spec in zip(tensors, self._expected.pop((peer, key)), strict=True)]

    def _codec(self, key: TransferKey) -> Bf16 | Int8 | None:
        """Return the codec of a transfer; None for one that is sent unchanged."""
        return self._codecs[cut_of(key)] if key.kind in (_ACTIVATIONS, _GRADIENTS) else None


def cut_of(key: TransferKey) -> int:
    """Return the cut that activations or gradients cross; the key names the stage that they are for."""
    return key.stage - (key.kind == _ACTIVATIONS)
