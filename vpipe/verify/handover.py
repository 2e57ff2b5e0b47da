"""Where every stage has a loss scale of its own: gradients on their way from one to another, for an oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vpipe.verify.reference_versions import Versions


def handed_over(gradient: Tensor | None, to: Versions, of: Versions) -> Tensor | None:
    """A gradient that one stage made, as another one takes it: with its own scale. The maker notes an overflow."""
    assert to.scale is not None, "stages have scales all together"
    assert of.scale is not None, "or none has"
    if gradient is None:
        return None
    of.overflow = of.overflow or not bool(gradient.isfinite().all())
    ratio = to.scale.value / of.scale.value
    return gradient if ratio == 1 else gradient * ratio


def hand_over(tensors: dict[str, Tensor], before: Versions, after: Versions) -> None:
    """At a cut: let what comes back through it be handed over; tensors that want a gradient are replaced."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            tensors[name] = _Cut.apply(tensor, before, after)  # type: ignore[no-untyped-call]


class _Cut(torch.autograd.Function):
    """Nothing forward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, before: Versions, after: Versions) -> Tensor:
        ctx.sides = before, after
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return handed_over(gradient, *ctx.sides), None, None
