"""Run one layer as a stage of its own, so that measurements use the code of the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vpipe.model.layer import LOSS, Model
from vpipe.model.split import StageSpec, alive
from vpipe.profiling.fingerprint import tied_owners
from vpipe.runtime.activations import Record
from vpipe.runtime.precision import FP32, Precision
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import StageOptimizer


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer, as a run would have them."""

    # the tensors that it reads, by name; requires_grad is set on those that need a gradient
    inputs: Mapping[str, Tensor]
    fields: Mapping[str, Tensor]  # the batch fields that it reads
    gradients: Mapping[str, Tensor]  # of the tensors that it writes and a later layer reads, where they need one


class LayerRunner:
    """Run a layer on its device.

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
        tied = tied_owners(model, number)
        borrowed = {f"{layer.name}.{own}": (owner, f"{model.layers[owner].name}.{parameter}")
                    for own, (owner, parameter) in tied.items()}
        spec = StageSpec(number, range(number, number + 1), self.reads, self.writes, self.fields, borrowed)
        self.stage = Stage(model, spec, seed=seed, device=device, recomputed=(), precision=precision)
        self.tied_bytes = {own: self.stage.modules[number].get_parameter(own).nbytes for own in tied}

    def forward(self, given: LayerInputs, *, split: bool = False) -> tuple[dict[str, Tensor], Record]:
        """Run one forward; return the layer's outputs and the record for its backward."""
        # As they arrive from another stage: leaves without a gradient.
        received = [given.inputs[name].detach().requires_grad_(given.inputs[name].requires_grad) for name in self.reads]
        outputs, record = self.stage.forward(received, given.fields, (0, 0), {}, split=split)
        return dict(zip(self.writes, outputs, strict=True)), record

    def drop(self, record: Record) -> None:
        """Drop the graph of a forward, as for a recomputed layer; :meth:`recompute` makes it again."""
        for saved in record.spans:
            saved.graph = None

    def recompute(self, record: Record) -> None:
        """Run the forward again."""
        self.stage.recomputes = True
        self.stage.recompute(record)

    def backward(self, record: Record, gradients: Mapping[str, Tensor], *, split: bool = False) -> dict[str, Tensor]:
        """Run one backward, or its input half; return the gradients of the layer's inputs."""
        names = [name for name, leaf in record.spans[0].inputs.items() if leaf.requires_grad]
        backward = self.stage.backward_input if split else self.stage.backward
        return dict(zip(names, backward(record, gradients), strict=True))

    def step(self, optimizer: StageOptimizer) -> None:
        """Make one update of the layer's own weights; their gradients are there again afterwards."""
        weights = self.stage.weights
        gradients = weights.gradients
        weights.step(optimizer)
        for leaf, gradient in zip(weights.graded(), gradients, strict=True):
            leaf.grad = gradient


def read_later(model: Model, number: int) -> tuple[str, ...]:
    """Return the layer's outputs that a later layer reads."""
    last = number + 1 == len(model)
    return tuple(name for name in dict.fromkeys(model.layers[number].outputs)
                 if (name == LOSS if last else name in alive(model, number + 1)))


def gradients_for(outputs: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return a gradient for each of the outputs that needs one."""
    return {name: torch.full_like(outputs[name], 1.0 if name == LOSS else 1e-3)
            for name in names if outputs[name].requires_grad}
