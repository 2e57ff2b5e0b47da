"""Learn from the last layer how much each label counts in what its loss is divided by, and check that it is so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import UserError
from vpipe.model.layer import LOSS, Layer
from vpipe.model.model import Model
from vpipe.model.sequential import is_mean_of_labels

Weigh = Callable[[Tensor], Tensor]
"""Labels of a microbatch -> the weights of its entries."""


@dataclass(frozen=True)
class ClassWeights:
    """How much labels count in the mean of ``nn.CrossEntropyLoss`` and ``nn.NLLLoss``: the weight of their class, 1
    without ``classes``; 0 for ``ignore_index``. Entries of soft labels count the same."""

    ignore_index: int = Model.NO_LABEL
    classes: tuple[float, ...] = ()

    @classmethod
    def of(cls, weight: Any = None, ignore_index: Any = Model.NO_LABEL, **_: object) -> ClassWeights:
        """Return those of a loss with these arguments."""
        return cls(ignore_index, () if weight is None else tuple(weight.tolist()))

    @classmethod
    def of_module(cls, layer: nn.Module) -> ClassWeights | None:
        """Return those of the loss modules in a layer; None without one, and where several differ."""
        found = {cls.of(loss.weight, loss.ignore_index) for loss in layer.modules() if is_mean_of_labels(loss)}
        return found.pop() if len(found) == 1 else None

    @classmethod
    def shared(cls, layers: Sequence[nn.Module], job: Exchange) -> ClassWeights:
        """Return on all ranks those of the last layer, which some of them have; where it has none, torch's defaults."""
        own = [vars(found) for layer in layers if (found := cls.of_module(layer)) is not None]
        told: dict[str, Any] = next((each[0] for each in job.all_gather(own) if each), {})
        return cls(told["ignore_index"], tuple(told["classes"])) if told else CLASSES_ALIKE

    def __call__(self, labels: Tensor) -> Tensor:
        there = labels != self.ignore_index
        if not self.classes or labels.is_floating_point():
            return there
        weights = torch.tensor(self.classes, dtype=torch.float64, device=labels.device)
        return weights.take(labels.long().clamp(0, len(self.classes) - 1)) * there


CLASSES_ALIKE = ClassWeights()
"""Torch's defaults."""


class LossCheck(TorchFunctionMode):
    """Call the last layer once, and refuse a loss that is not divided by the weights of its labels, as far as the calls
    of torch's losses show.

    Args:
        field: with the labels.
        weigh: how all ranks weigh them; ``said``: whether the model says so.
    """

    def __init__(self, layer: Layer, field: str, weigh: Weigh, said: bool) -> None:
        super().__init__()
        self._layer, self._field, self._weigh, self._said = layer, field, weigh, said
        self._calls: list[tuple[Callable[..., Tensor], dict[str, Any], Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__module__", None) == F.__name__ and "reduction" in (
                takes := signature(function)).parameters:
            self._calls.append((function, takes.bind(*args, **(kwargs or {})).arguments, result))
        return result

    def __call__(self, module: nn.Module, *arguments: Tensor, **keywords: Any) -> Any:
        # Compiled code shows no calls, and attention computes other numbers in an evaluation when it is watched.
        hidden = any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") or isinstance(
            part, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for part in module.modules())
        with nullcontext() if hidden else self:
            outputs = module(*arguments, **keywords)
        loss = outputs[self._layer.outputs.index(LOSS)] if isinstance(outputs, tuple) else outputs
        # The one that the layer returns; else those that it may be made of.
        calls = [call for call in self._calls if call[2] is loss] or [
            call for call in self._calls if call[2].requires_grad or not torch.is_grad_enabled()]
        if not (calls or self._said or (hidden and ClassWeights.of_module(module))):
            raise self._refusal("does not show a loss of torch's" + ", as it is compiled or has attention" * hidden)
        with torch.no_grad():
            labels = arguments[self._layer.inputs.index(self._field)].cpu()
            counted = float(torch.as_tensor(self._weigh(labels)).sum(dtype=torch.float64))
            for call in calls:
                self._check(*call, loss, counted, labels.numel())
        return outputs

    def _check(self, function: Callable[..., Tensor], given: dict[str, Any], made: Tensor, loss: Tensor,
               labels: float, entries: int) -> None:
        by_class = function in (F.cross_entropy, F.nll_loss) and not given["target"].is_floating_point()
        if (reduced := given.get("reduction") not in ("none", "sum") and function is not F.ctc_loss):
            given = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
                     for name, value in given.items()}
            divisor, error = float(function(**given | {"reduction": "sum"}) / function(**given)), 1e-6
            if by_class and not self._said and (own := ClassWeights.of(**given)) != self._weigh:
                raise self._refusal(f"calls {function.__name__} with other weights", own)
        elif self._said:
            return
        else:
            divisor, error = float(made.sum() / loss), 1e-5 + torch.finfo(loss.dtype).eps
        if not (labels and 0 < divisor < torch.inf):  # NaN, too, of no labels
            return
        off = (times := max(divisor, labels) / min(divisor, labels)) - 1
        if reduced and not by_class:  # a mean of all elements is one of labels, too, if each that counts has as many
            off = abs((times + 0.5) % 1 - 0.5) if labels == entries or round(divisor) % entries else times
        if off > error * times:
            raise self._refusal(f"calls {function.__name__}, whose sum is divided by {divisor:g} where the labels "
                                f"count {labels:g}")

    def _refusal(self, what: str, weights: ClassWeights = CLASSES_ALIKE) -> UserError:
        there = f"labels != {weights.ignore_index}"
        code = f"weight[labels * ({there})] * ({there})" if weights.classes else there
        return UserError(f"losses count by their labels, '{self._field}', but the last layer {what}",
                         hint="divide the loss by the weights of its labels, and say them: Model(..., labels="
                              f"'{self._field}', label_weights=lambda labels: {code}), a weight for each; or leave out "
                              "labels and per_token_loss")
