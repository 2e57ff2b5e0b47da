"""Give each microbatch of a stage without a flush its weight version, and make the next version in an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.schedules.registry import VersionRule, recipe_named
from vpipe.verify.reference_optimizer import InitialState, ReferenceLossScale, TrainingRecipe


def version_rule(schedule: str) -> VersionRule:
    """Return the closed form of the weight versions that an asynchronous schedule is registered with.

    Sources: PipeDream (SOSP 2019), section 3.3, weight stashing and vertical sync, and for replicas 1F1B-RR in section
    3.2; PipeDream-2BW (arXiv:2006.09503), section 3.1.
    """
    rule = recipe_named(schedule).version_of
    assert rule is not None, f"'{schedule}' is registered without version_of"
    return rule


class StageVersions:
    """The weight versions of one stage, and its optimizer.

    Args:
        parameters: those that its optimizer steps.
        every: microbatches of an update per replica.
        width: replicas.
        rate: learning rate relative to that of the first stage.
        layer: first layer of the stage.

    Attributes:
        span: microbatches of an update, over all replicas.
        seen: microbatches since the last update.
        first: the latest version when the pipeline began to fill.
        scale: the factor of its gradients; None where losses are not scaled.
        overflow: whether, since the last update, it sent a gradient that is not finite.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: TrainingRecipe, every: int, width: int,
                 rate: float, start: InitialState, layer: int = 0) -> None:
        self.parameters, self.span, self.seen, self.first = parameters, every * width, 0, 0
        self._recipe, self._every, self._rate = recipe, every, rate
        self.optimizers = recipe.optimizers(parameters, start)
        self.scale, self.overflow = ReferenceLossScale.create(recipe.precision, layer, start.tensors), False
        self._versions = [self._copy()]

    @property
    def latest(self) -> int:
        return len(self._versions) - 1

    def leaves(self, version: int) -> dict[str, Tensor]:
        """Return copies of the parameters for one microbatch, ``version`` updates after the first, with their hooks.

        Hooks that run after accumulation see the gradient of this microbatch only.
        """
        leaves = {name: value.clone().requires_grad_() for name, value in self._versions[self.first + version].items()}
        for name, leaf in leaves.items():
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if hooks := getattr(self.parameters[name], kind):
                    setattr(leaf, kind, hooks)
        return leaves

    def update(self, gradients: Mapping[str, Tensor | None], step: int) -> bool:
        """Apply the mean over the microbatches seen of gradients that are sums divided by ``every``, or skip it.

        Returns:
            Whether the update was applied.
        """
        if self.seen != self._every:
            share = self._every / self.seen
            gradients = {name: None if each is None else each.to(self.parameters[name].dtype) * share
                         for name, each in gradients.items()}
        made = self._recipe.apply(gradients, self.parameters, self.optimizers, self.latest,
                                  self._recipe.factor(step) * self._rate, self.scale, self.overflow)
        self._versions.append(self._copy())
        self.seen, self.overflow = 0, False
        return not made.skipped

    def _copy(self) -> dict[str, Tensor]:
        return {name: self._recipe.precision.weight(p.detach()).clone() for name, p in self.parameters.items()}


def rescaled(gradient: Tensor | None, to: StageVersions, of: StageVersions) -> Tensor | None:
    """Return a gradient of stage ``of`` multiplied by the loss scale of stage ``to``; note an overflow on ``of``."""
    assert to.scale is not None, "stages have scales all together"
    assert of.scale is not None, "or none has"
    if gradient is None:
        return None
    of.overflow = of.overflow or not bool(gradient.isfinite().all())
    ratio = to.scale.value / of.scale.value
    return gradient if ratio == 1 else gradient * ratio


def rescale_at_cut(tensors: dict[str, Tensor], before: StageVersions, after: StageVersions) -> None:
    """At a cut, replace the tensors that require a gradient by ones whose gradient is rescaled in backward."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            tensors[name] = _RescaleGradient.apply(tensor, before, after)  # type: ignore[no-untyped-call]


class _RescaleGradient(torch.autograd.Function):
    """The identity, whose backward rescales the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, before: StageVersions, after: StageVersions) -> Tensor:
        ctx.sides = before, after
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return rescaled(gradient, *ctx.sides), None, None
