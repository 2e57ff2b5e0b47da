"""The optimizer step of the stages of one rank: learning rate, clipping, the step itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vpipe.runtime.transport import Key, Transport
from vpipe.runtime.weights import Weights

ABSENT = -1.0
"""Stands in the vector of norms for a parameter without a gradient: no norm is negative."""


@dataclass
class Update:
    """How weights are updated.

    Attributes:
        optimizers: per stage of this rank; None for a stage with nothing to train.
        factor: the learning rate of update k is the optimizer's own times ``factor(k)``.
        clip: greatest norm of the gradients, or None.
        offsets: where each stage's norms begin in the vector of all parameters' norms; its last entry is
            the vector's length. None when every stage clips for itself, as it must without a flush.
        dtype: of the norms, as plain PyTorch would have them.
    """

    optimizers: Mapping[int, torch.optim.Optimizer | None]
    factor: Callable[[int], float]
    clip: float | None
    offsets: tuple[int, ...] | None
    dtype: torch.dtype = torch.float32
    gradient_norm: Tensor | None = None
    _norms: Tensor | None = None
    _published: int = 0
    _stepped: int = field(default=0)

    @property
    def global_norm(self) -> bool:
        """Whether steps wait for the norms of all stages."""
        return self.clip is not None and self.offsets is not None

    def ready(self, transport: Transport, number: int) -> bool:
        """Whether a step can be taken without waiting for norms."""
        return not self.global_norm or self._stepped > 0 or transport.norms_ready(_key(number))

    def publish_norms(self, transport: Transport, stage: int, weights: Weights, number: int) -> None:
        """Contribute the norms of a stage's gradients; they leave with those of the rank's last stage."""
        assert self.offsets is not None
        gradients = weights.gradients
        if self._norms is None:
            device = next((g.device for g in gradients if g is not None), None)
            self._norms = torch.zeros(self.offsets[-1], dtype=torch.float64, device=device)  # holds any norm exactly
        for i, gradient in enumerate(gradients, self.offsets[stage]):
            self._norms[i] = ABSENT if gradient is None else torch.linalg.vector_norm(gradient)
        self._published += 1
        if self._published == len(self.optimizers):
            transport.publish_norms(_key(number), self._norms)
            self._norms, self._published = None, 0

    def step(self, transport: Transport, stage: int, weights: Weights, number: int) -> None:
        """Make the next version of a stage's weights."""
        optimizer = self.optimizers[stage]
        if self.global_norm:
            if not self._stepped:
                norms = transport.norms(_key(number)).to(self.dtype)
                # As torch.nn.utils.clip_grad_norm_ does on the whole model, so that the result is the same number.
                self.gradient_norm = torch.linalg.vector_norm(norms[norms != ABSENT])
            self._stepped = (self._stepped + 1) % len(self.optimizers)
            assert self.gradient_norm is not None
            self._scale(weights, self.gradient_norm)
        elif self.clip is not None:
            each = [torch.linalg.vector_norm(g) for g in weights.gradients if g is not None]
            if each:
                self._scale(weights, torch.linalg.vector_norm(torch.stack(each)))
        if optimizer is not None:
            factor = self.factor(number)
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        weights.step(optimizer)

    def _scale(self, weights: Weights, norm: Tensor) -> None:
        assert self.clip is not None
        gradients = [g for g in weights.gradients if g is not None]
        if gradients:
            torch._foreach_mul_(gradients, torch.clamp(self.clip / (norm + 1e-6), max=1.0).to(gradients[0].device))


def _key(number: int) -> Key:
    return Key("N", 0, number)
