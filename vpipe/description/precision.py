"""Describe precisions: the dtypes in which layers compute and return.

Rounding goes with the layer, not with the stage: a tensor between two layers has the reduced precision wherever the
model is cut, so every partition computes the same numbers, and transfers take half the bytes.

``bf16`` and ``fp16`` compute under :class:`torch.autocast`, layer by layer, with weights and gradients in fp32.
``bf16_pure`` holds weights and gradients in bf16, and fp32 masters that the optimizer steps
(Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1). ``fp16`` scales the loss (section 3.2 there).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Literal, get_args

from vpipe.arguments import shown
from vpipe.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

_DTYPES = {"bf16": "bfloat16", "bf16_pure": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Precision:
    """The precision of a pipeline.

    Attributes:
        name: of the layers: ``fp32``; ``bf16`` or ``fp16``, each layer under torch.autocast; ``bf16_pure``, weights and
            gradients in bf16 too, with fp32 masters. In the last three a tensor between layers is rounded, wherever the
            model is cut. ``fp16`` skips an update that overflows.
        loss_scale: by which ``fp16`` multiplies losses; found while training when None, under a schedule with a flush.

    Raises:
        UserError: no such precision, or a loss scale that is no positive number or not used.
    """

    Name = Literal["fp32", "bf16", "bf16_pure", "fp16"]

    name: str
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        if self.name not in (known := get_args(Precision.Name)):
            raise UserError(f"precision is {shown(self.name)}", hint=nearest(shown(self.name), known))
        if self.loss_scale is None:
            return
        if not self.scaled:
            raise UserError(f"loss_scale is {shown(self.loss_scale)}, but the precision is {self.name}",
                            hint="only fp16 scales its loss: leave it out")
        scale = self.loss_scale
        if type(scale) not in (int, float) or not isfinite(scale) or scale <= 0:
            raise UserError(f"loss_scale is {shown(scale)}",
                            hint="give a number above 0, such as 1024, or leave it out: training finds it")
        object.__setattr__(self, "loss_scale", float(scale))

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """Return the reduced dtype; None for fp32."""
        import torch  # here, for a config is read without torch

        return getattr(torch, _DTYPES[self.name]) if self.name in _DTYPES else None

    @property
    def pure(self) -> bool:
        """Return whether weights are held in the reduced precision, beside fp32 masters."""
        return self.name == "bf16_pure"

    @cached_property
    def autocasts(self) -> bool:
        """Return whether every layer runs in an autocast of its own."""
        return self.dtype is not None and not self.pure

    @property
    def scaled(self) -> bool:
        """Return whether the loss is scaled."""
        return self.name == "fp16"

    @property
    def dynamic(self) -> bool:
        """Return whether the scale of the loss is found while training."""
        return self.scaled and self.loss_scale is None

    def refused(self, codecs: Collection[str], flush: bool) -> Iterator[tuple[str, str, str]]:
        """Yield conflicts with codecs between stages and with the schedule: the argument, the problem, the remedy."""
        if self.dynamic and not flush:
            yield ("loss_scale", "is dynamic, but the schedule has no flush, at which stages would tell each other of "
                   "an overflow", "set loss_scale to a number such as 1024, or precision to bf16, or choose a schedule "
                   "with a flush such as 1f1b")
        if self.name in _DTYPES and "bf16" in codecs:  # asked of a config, which is read without torch
            yield ("compress", f"is bf16, but in precision {self.name} tensors between stages have 16 bits already",
                   "leave it out, or send them as int8")


FP32 = Precision("fp32")
