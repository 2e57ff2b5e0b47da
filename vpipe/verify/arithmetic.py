"""What a precision computes, for a sequential program: plain PyTorch, with a cast between layers.

It shares no code with the engine, which must give the same bits. In ``bf16`` and ``fp16`` every layer runs
under a ``torch.autocast`` of its own; in ``bf16_pure`` the layers themselves are bf16, and so is what they read.
In each of the three a float32 tensor is rounded when a layer hands it on, but for the loss, which is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vpipe.model.layer import LOSS
from vpipe.model.sequential import rounded_module

_REDUCED = {"bf16": torch.bfloat16, "bf16_pure": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Arithmetic:
    """The numbers that an oracle computes with.

    Attributes:
        precision: as ``training.precision`` says.
        loss_scale: of fp16: a number that stays, or None for one that follows the overflows.
    """

    precision: str = "fp32"
    loss_scale: float | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The reduced one; None in fp32."""
        return _REDUCED.get(self.precision)

    @property
    def pure(self) -> bool:
        """Whether the layers are rounded themselves."""
        return self.precision == "bf16_pure"

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled."""
        return self.precision == "fp16"

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows the overflows."""
        return self.scaled and self.loss_scale is None

    @property
    def words(self) -> str:
        """What a plain program in it is, after "plain PyTorch"."""
        if self.dtype is None:
            return ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (f" with {dtype} layers and float32 master weights" if self.pure else
                f" under torch.autocast({dtype})" + " with loss scaling" * self.scaled)

    def round(self, modules: Iterable[nn.Module]) -> None:
        """Round parameters and buffers, where the layers are rounded themselves."""
        if self.pure:
            for module in map(rounded_module, modules):
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = self.weight(tensor.data)

    def weight(self, master: Tensor) -> Tensor:
        """What a layer has of its own, as it computes with it."""
        return self._rounded(master) if self.pure else master

    def fields(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fields of a batch as layers read them."""
        return {name: self.weight(value) for name, value in batch.items()}

    def outputs(self, names: Sequence[str], call: Callable[[], object]) -> dict[str, Tensor]:
        """What a layer hands on, by name, when it is called."""
        autocast = self.dtype is not None and not self.pure
        with torch.autocast("cpu", dtype=self.dtype) if autocast else nullcontext():
            result = call()
        made = dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))
        return {name: self._loss(tensor) if name == LOSS else self._rounded(tensor) for name, tensor in made.items()}

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None or tensor.dtype != torch.float32 else tensor.to(self.dtype)

    def _loss(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self.dtype else tensor


FP32 = Arithmetic()
