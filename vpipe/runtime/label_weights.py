"""Learn from the last layer how much each label counts in what its loss is divided by; check that; count by labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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
    def of(cls, weight: Any, ignore_index: Any) -> ClassWeights:
        """Return those of a loss with these arguments."""
        return cls(ignore_index, () if weight is None else tuple(weight.tolist()))

    @classmethod
    def of_module(cls, layer: nn.Module) -> ClassWeights | None:
        """Return those of the loss modules in a layer; None without one, and where several differ."""
        found = {cls.of(loss.weight, loss.ignore_index) for loss in layer.modules() if is_mean_of_labels(loss)}
        return found.pop() if len(found) == 1 else None

    def __call__(self, labels: Tensor) -> Tensor:
        there = labels != self.ignore_index
        if not self.classes or labels.is_floating_point():
            return there
        weights = torch.tensor(self.classes, dtype=torch.float64, device=labels.device)
        return weights.take(labels.long().clamp(0, len(self.classes) - 1)) * there


CLASSES_ALIKE = ClassWeights()
"""Torch's defaults."""


@dataclass(frozen=True)
class LabelCount:
    """How the labels of microbatches count.

    Attributes:
        field: that has them.
        weigh: returns how much each of them counts.
        over_lanes: returns the sums of such numbers over the lanes that read batches of their own.
        by_label: whether microbatches, and parts of them, count by their labels. Else microbatches count alike, and
            parts by their shares of the labels of their microbatch.
    """

    field: str
    weigh: Weigh = CLASSES_ALIKE
    over_lanes: Callable[[list[float]], list[float]] = list
    by_label: bool = True

    def of(self, microbatches: Sequence[Sequence[Tensor]]) -> Iterable[tuple[float, float]]:
        """Return how much every part of every microbatch counts, here and over lanes, by the labels of each part. Where
        microbatches count alike, each counts with its last part."""
        parts = list(chain.from_iterable(microbatches))
        own = [1.0] * len(parts) if parts[0].is_meta else torch.stack([
            torch.as_tensor(self.weigh(labels)).sum(dtype=torch.float64) for labels in parts]).tolist()
        if self.by_label:
            return zip(own, self.over_lanes(own), strict=True)
        [lanes], counts, numbers = self.over_lanes([1]), list[tuple[float, float]](), iter(own)
        for microbatch in microbatches:
            labels = [next(numbers) for _ in microbatch]
            counts += [(each / (sum(labels) or 1), 0) for each in labels]
            counts[-1] = counts[-1][0], lanes
        return counts


class LossCheck(TorchFunctionMode):
    """Call the last layer, and refuse a loss that is no mean of torch's over the labels of a field, so weighed."""

    def __init__(self, field: str, weigh: ClassWeights) -> None:
        super().__init__()
        self._field, self._weigh = field, weigh
        self._calls: list[tuple[dict[str, Any], Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (F.cross_entropy, F.nll_loss):
            given = signature(function).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            self._calls.append((given.arguments, result))
        return result

    def __call__(self, layer: Layer, module: nn.Module, *arguments: Tensor, **keywords: Any) -> Any:
        # Compiled code shows no calls, and attention computes other numbers in an evaluation when it is watched.
        hidden = any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") or isinstance(
            part, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for part in module.modules())
        with nullcontext() if hidden else self:
            outputs = module(*arguments, **keywords)
        loss = outputs[layer.outputs.index(LOSS)] if isinstance(outputs, tuple) else outputs
        # The one that the layer returns; else those that it may be made of.
        calls = [call for call in self._calls if call[1] is loss] or self._calls
        if not calls and not (hidden and ClassWeights.of_module(module)):
            raise self._refusal("shows no cross entropy of torch's" + ", as it is compiled or has attention" * hidden)
        for given, _ in calls:
            own = ClassWeights.of(given["weight"], given["ignore_index"])
            divisor = float(own(given["target"]).sum())
            counted = float(self._weigh(arguments[layer.inputs.index(self._field)]).sum())
            if given["reduction"] != "mean" or own != self._weigh or not math.isclose(divisor, counted):
                raise self._refusal(f"has a {given['reduction']} over labels that count {divisor:g} where those of the "
                                    f"field count {counted:g}")
        return outputs

    def _refusal(self, what: str) -> UserError:
        return UserError(f"losses count by their labels, '{self._field}', but the last layer {what}",
                         hint="say by what the loss is divided, a weight for each label: Model(..., labels="
                              f"'{self._field}', label_weights=lambda labels: labels != 0), or weight[labels] of "
                              "classes; or leave out labels and per_token_loss")
