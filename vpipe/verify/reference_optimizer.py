"""How an oracle trains: what :class:`vpipe.Pipeline` is told, and how an update is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vpipe.verify.arithmetic import FP32, Arithmetic
from vpipe.verify.initial_state import Start
from vpipe.verify.loss_scale import LossScale
from vpipe.verify.trajectory import Trail

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]],
                         torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None] | None]

Cross = Callable[[int, int, int, dict[str, Tensor]], None]
"""(microbatch of the run, microbatch since the pipeline was empty, layer, tensors so far): what compression makes of
the tensors before that layer, put in their place."""


def uncompressed(number: int, microbatch: int, layer: int, tensors: dict[str, Tensor]) -> None:
    """All tensors arrive as they are."""


class Applied(NamedTuple):
    """What came of an update.

    Attributes:
        norm: of the gradients before clipping, if they are clipped.
        skipped: whether they were not applied.
    """

    norm: float | None
    skipped: bool


@dataclass(frozen=True)
class Training:
    """How to train, as :class:`vpipe.Pipeline` takes it."""

    optimizer: MakeOptimizer
    microbatches: int
    seed: int = 0
    factor: Callable[[int], float] = lambda update: 1.0
    clip: float | None = None
    trail: Trail | None = None  # where to note every update
    cross: Cross = uncompressed
    skip: bool = False  # an update whose losses and gradient norms are not all finite
    arithmetic: Arithmetic = FP32

    def optimizers(self, parameters: Mapping[str, nn.Parameter], start: Start) -> list[torch.optim.Optimizer]:
        """Those of some parameters, with the state that they begin with."""
        made = self.optimizer(parameters)
        entries: Sequence[object] = made if isinstance(made, (list, tuple)) else [made]
        optimizers = [each for each in entries if isinstance(each, torch.optim.Optimizer)]
        for optimizer in optimizers:
            start.fill(optimizer, parameters)
        return optimizers

    def backward(self, loss: Tensor, parts: int, scale: LossScale | None = None) -> None:
        """Of a microbatch's share of the mean. One that is not finite is NaN to every gradient, when that counts."""
        lost = torch.full_like(loss, math.nan) if self.skip and not loss.isfinite() else None
        if scale is None:
            torch.autograd.backward(loss / parts, lost)
        else:
            torch.autograd.backward(loss, torch.full_like(loss, scale.value / parts) if lost is None else lost)

    def apply(self, gradients: Mapping[str, Tensor | None], parameters: Mapping[str, nn.Parameter],
              optimizers: Sequence[torch.optim.Optimizer], update: int, factor: float,
              scale: LossScale | None = None, overflow: bool = False) -> Applied:
        """Make an update of these parameters, or skip it.

        Args:
            gradients: by the names of the parameters, which may hold more bits; multiplied with the scale. Those of
                parameters that no optimizer steps count nowhere.
            update: its number, for the trail.
            factor: of the learning rate.
            overflow: whether something else than these gradients is not finite.
        """
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        gradients = {name: None if gradient is None or id(parameters[name]) not in trained
                     else gradient.to(parameters[name].dtype) for name, gradient in gradients.items()}
        if scale is not None:
            gradients = {name: None if gradient is None else gradient * (1.0 / scale.value)
                         for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        if self.trail is not None:
            self.trail.gradients(update, gradients)
        overflow = overflow or not all(bool(torch.linalg.vector_norm(gradient).isfinite())
                                       for gradient in gradients.values() if gradient is not None)
        skipped = overflow and (self.skip or scale is not None)
        norm = None if self.clip is None else float(nn.utils.clip_grad_norm_(parameters.values(), self.clip))
        for optimizer in () if skipped else optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
            optimizer.step()
        for parameter in parameters.values():
            parameter.grad = None
        if self.trail is not None:
            self.trail.weights(update, parameters)
        if scale is not None:
            scale.updated(overflow)
        return Applied(norm, skipped)
