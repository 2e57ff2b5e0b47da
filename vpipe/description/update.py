"""Describe an update of the weights: the optimizer of a stage, its learning rate, and what limits a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vpipe.arguments import Arguments, as_number, shown
from vpipe.errors import UserError

if TYPE_CHECKING:
    from torch import nn, optim

    Optimizers = optim.Optimizer | Sequence[optim.Optimizer | None] | None
    OptimizerFactory = Callable[[list[nn.Parameter]], Optimizers]


@runtime_checkable
class FromNamed(Protocol):
    """An optimizer factory that wants the parameters' names, for weight decay by name."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> Optimizers:
        """Make the optimizer of a stage, or several; None when the stage has nothing to train."""


@dataclass(frozen=True)
class Update:
    """An update.

    Attributes:
        optimizer: makes a stage's optimizer, or a list of them, from its parameters; see docs/optimizers.md. Its
            learning rate is the base that ``learning_rate_factor`` multiplies.
        learning_rate_factor: step number -> factor; asked once per step in a process.
        grad_clip: greatest gradient norm: over all stages with a flush, of each stage without one; None: any.
        skip_not_finite: skip an update when a loss or the norm of a gradient in it is not finite: with a flush on all
            stages, without one on each stage that has such a gradient. Weights and optimizer stay as they were.
        zero1: each replica of a stage steps a part of its parameters, whole ones, and has the optimizer's state of
            these alone; the numbers are the same. Without replicas it changes nothing. As a plan says when None, else
            not.
        per_token_loss: the loss of an update is the mean over all labels of its microbatches, of the field that
            ``Model(labels=...)`` names, instead of the mean of the microbatches' means.
        average: the decay of an exponential moving average that follows the weights, such as 0.999; None: none does.

    Raises:
        UserError: a value is of another kind.
    """

    optimizer: OptimizerFactory | FromNamed
    learning_rate_factor: Callable[[int], float] = lambda step: 1.0
    grad_clip: float | None = None
    skip_not_finite: bool = False
    zero1: bool | None = None
    per_token_loss: bool = False
    average: float | None = None

    def __post_init__(self) -> None:
        given = Arguments()
        _check_optimizer(given, self.optimizer)
        given.function("learning_rate_factor", self.learning_rate_factor, 1,
                       "give a function of the step's number: learning_rate_factor=lambda step: 0.99**step; a "
                       "scheduler of torch's is made with the optimizer, see docs/optimizers.md")
        object.__setattr__(self, "grad_clip", given.number("grad_clip", self.grad_clip, 1.0, or_none=True))
        given.flag("skip_not_finite", self.skip_not_finite)
        if self.zero1 is not None:
            given.flag("zero1", self.zero1)
        given.flag("per_token_loss", self.per_token_loss)
        object.__setattr__(self, "average", given.number("average", self.average, 0.999, or_none=True))
        if self.average is not None and self.average >= 1:
            given.refuse(f"average is {shown(self.average)}", "give the decay of the average, below 1, such as 0.999")
        given.check()

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step. Raises UserError when it is not a finite number."""
        value = self.learning_rate_factor(step)
        if (number := as_number(value)) is None or not math.isfinite(number):
            raise UserError(f"learning_rate_factor({step}) is {shown(value)}",
                            hint="let it return a finite number for the number of every step, such as 1.0")
        return number

    def counted_labels(self, labels: str | None) -> str | None:
        """Return the field whose labels give microbatches their weights; None where all weigh the same.

        Args:
            labels: the field of the model.

        Raises:
            UserError: the model has none.
        """
        if self.per_token_loss and labels is None:
            raise UserError("per_token_loss is True, but the model does not say which field of a batch has its labels",
                            hint="name it, if the loss is the mean over its entries that are not -100: Model(layers, "
                                 "batch=..., labels='labels'); or leave per_token_loss out")
        return labels if self.per_token_loss else None

    def make_optimizer(self, named: Mapping[str, nn.Parameter]) -> Optimizers:
        """Make the optimizer of a stage, or several, from its parameters by name; None where there are none."""
        if isinstance(self.optimizer, FromNamed):
            return self.optimizer.from_named(named)
        return self.optimizer(list(named.values())) if named else None


def _check_optimizer(given: Arguments, optimizer: object) -> None:
    import torch  # here, for a config is read without torch

    hint = "give a function that makes one: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
    made = optimizer[0] if isinstance(optimizer, (list, tuple)) and optimizer else optimizer
    if isinstance(made, torch.optim.Optimizer):
        given.refuse(f"optimizer is {shown(made)}, which holds other tensors than the stages train", hint)
    elif not isinstance(optimizer, FromNamed):
        given.function("optimizer", optimizer, 1, hint)
