"""Rounding between fp32 and a reduced precision: of what layers hand on, of weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from vpipe.model.layer import LOSS


@dataclass(frozen=True)
class Rounding:
    """To a reduced precision, and back. Other kinds of numbers, such as float64 and integers, stay what they are."""

    dtype: torch.dtype

    def handed_on(self, name: str, tensor: Tensor) -> Tensor:
        """A layer's output as the next layer finds it: rounded; the loss in fp32."""
        return self.widened(tensor) if name == LOSS else self.rounded(tensor)

    def rounded(self, tensor: Tensor) -> Tensor:
        """The tensor in the reduced precision, if it is fp32."""
        return tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor

    def widened(self, tensor: Tensor) -> Tensor:
        """The tensor in fp32, if it has the reduced precision."""
        return tensor.float() if tensor.dtype is self.dtype else tensor

    def round(self, modules: Iterable[nn.Module]) -> dict[int, Tensor]:
        """Round parameters and buffers in place; what the parameters were before, by their ids."""
        before: dict[int, Tensor] = {}
        for module in modules:
            before |= {id(p): p.data for p in module.parameters() if p.dtype is torch.float32}
            for tensor in chain(module.parameters(), module.buffers()):
                tensor.data = self.rounded(tensor.data)
        return before
