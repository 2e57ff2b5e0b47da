"""One layer as a stage of its own, so that what is measured is what the runtime does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vpipe.model.layer import LOSS, Model
from vpipe.model.split import StageSpec, alive
from vpipe.profiling.fingerprint import owners
from vpipe.runtime.activations import Record
from vpipe.runtime.precision import FP32, Precision
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import StageOptimizer


@dataclass(frozen=True)
class Given:
    """What a layer is given, as a run would give it.

    Attributes:
        inputs: the tensors that it reads, by name; of those that want a gradient, ``requires_grad`` says so.
        fields: the batch fields that it reads.
        gradients: of the tensors that it writes and somebody reads, where they want one.
    """

    inputs: Mapping[str, Tensor]
    fields: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


class Bench:
    """A layer on its device.

    Args:
        number: of the layer in the model.
        precision: in which it computes.
    """

    def __init__(self, model: Model, number: int, device: torch.device, seed: int,
                 precision: Precision = FP32) -> None:
        layer = model.layers[number]
        self.number, self.name = number, layer.name
        self.reads = tuple(dict.fromkeys(name for name in layer.inputs if name not in model.batch))
        self.fields = tuple(dict.fromkeys(name for name in layer.inputs if name in model.batch))
        self.writes = tuple(dict.fromkeys(layer.outputs))
        tied = owners(model, number)
        borrowed = {f"{layer.name}.{own}": (owner, f"{model.layers[owner].name}.{parameter}")
                    for own, (owner, parameter) in tied.items()}
        spec = StageSpec(number, range(number, number + 1), self.reads, self.writes, self.fields, borrowed)
        self.stage = Stage(model, spec, seed=seed, device=device, recomputed=(), precision=precision)
        self.tied_bytes = {own: self.stage.modules[number].get_parameter(own).nbytes for own in tied}

    def forward(self, given: Given, *, split: bool = False) -> tuple[dict[str, Tensor], Record]:
        """One microbatch forward: what the layer wrote, and what backward needs."""
        received = [_leaf(given.inputs[name]) for name in self.reads]
        outputs, record = self.stage.forward(received, given.fields, (0, 0), {}, split=split)
        return dict(zip(self.writes, outputs, strict=True)), record

    def drop(self, record: Record) -> None:
        """Let the graph of a forward go, as a recomputed layer does; :meth:`recompute` makes it anew."""
        for held in record.held:
            held.graph = None

    def recompute(self, record: Record) -> None:
        """The forward again."""
        self.stage.recomputes = True
        self.stage.recompute(record)

    def backward(self, record: Record, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One whole backward: the gradients of what the layer read."""
        names = self._returned(record)
        return dict(zip(names, self.stage.backward(record, gradients), strict=True))

    def backward_input(self, record: Record, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its first half."""
        names = self._returned(record)
        return dict(zip(names, self.stage.backward_input(record, gradients), strict=True))

    def backward_weight(self, record: Record) -> None:
        """Its second half."""
        self.stage.backward_weight(record)

    def step(self, optimizer: StageOptimizer) -> None:
        """One update of the layer's own weights; their gradients are there again afterwards."""
        weights = self.stage.weights
        gradients = weights.gradients
        weights.step(optimizer)
        for leaf, gradient in zip(weights.graded(), gradients, strict=True):
            leaf.grad = gradient

    def _returned(self, record: Record) -> list[str]:
        return [name for name, leaf in record.held[0].inputs.items() if leaf.requires_grad]


def read_later(model: Model, number: int) -> tuple[str, ...]:
    """Which of the tensors that a layer writes somebody reads."""
    last = number + 1 == len(model)
    return tuple(name for name in dict.fromkeys(model.layers[number].outputs)
                 if (name == LOSS if last else name in alive(model, number + 1)))


def gradients_for(outputs: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Something to come back for those of the outputs that want it."""
    return {name: torch.full_like(outputs[name], 1.0 if name == LOSS else 1e-3)
            for name in names if outputs[name].requires_grad}


def _leaf(tensor: Tensor) -> Tensor:
    """As it arrives from another stage: nothing has flowed back to it yet."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
