"""A model on one device that knows how a pipeline would cut it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vpipe.model.layer import Model, set_parameter, split_target
from vpipe.model.split import split
from vpipe.verify.arithmetic import FP32, Arithmetic


class Whole:
    """All layers of a model, and what the stages of a partition and their replicas have of their own in them.

    Args:
        seed: of the initial weights.
        partition: layers per stage.
        widths: replicas per stage.
        arithmetic: whether layers are rounded.

    Attributes:
        layers: modules, in order.
        parameters: trainable ones by ``"<layer>.<parameter>"``, tied ones once, under the first name.
        masters: what an optimizer steps; the parameters themselves, or, where these are rounded, unrounded ones.
        owners: the far sides of ties, in the order of the stages -> the parameter. All uses of a weight in a stage
            that borrows it are one value, called ``"<parameter>@<stage>"``.
        stage_of: parameters and sides -> their stage.
        names: per layer, its own names of parameters -> what each goes by: a side's name, or the parameter's.
    """

    def __init__(self, model: Model, seed: int, partition: Sequence[int], widths: Sequence[int],
                 arithmetic: Arithmetic = FP32) -> None:
        self._model, self._modules, self.widths = model, model.materialize(seed), tuple(widths)
        self.layers = [self._modules[layer.name] for layer in model.layers]
        specs = split(model, partition)
        assert len(specs) == len(widths), "one width per stage"
        self._stage = [spec.index for spec in specs for _ in spec.layers]
        self.parameters = self._named()
        self.masters = self.parameters if not arithmetic.pure else {
            name: nn.Parameter(p.detach().clone()) for name, p in self.parameters.items()}
        self._kinds = {name: value.dtype for name, value in self._held().items()}
        arithmetic.round(self.layers)
        sides = {own: f"{target}@{spec.index}" for spec in specs for own, (_, target) in spec.borrowed.items()}
        self.owners = {side: side.rpartition("@")[0] for side in sides.values()}
        self.stage_of = {name: self._stage[model.index(split_target(name, model.layers)[0])]
                         for name in self.parameters}
        self.stage_of |= {side: int(side.rpartition("@")[2]) for side in self.owners}
        self.names = self._names(sides)
        # Resting in the modules are replica 0's; those of the others stand here.
        self._buffers = [[[buffer.clone() for buffer in layer.buffers()] for _ in range(1, widths[stage])]
                         for layer, stage in zip(self.layers, self._stage, strict=True)]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Weights and buffers of a checkpoint, before anything is computed, if it has any. A replica that it has no
        buffers of gets the first one's."""
        if not tensors:
            return
        if self.masters is not self.parameters:
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(tensors[f"model.{name}"])
        for layer, module, others in zip(self._model.layers, self.layers, self._buffers, strict=True):
            prefix = f"model.{layer.name}."
            module.load_state_dict({name.removeprefix(prefix): value for name, value in tensors.items()
                                    if name.startswith(prefix)}, strict=False)
            for replica, buffers in enumerate(others, start=1):
                for (name, first), buffer in zip(module.named_buffers(), buffers, strict=True):
                    buffer.copy_(tensors.get(f"buffers.{replica}.{layer.name}.{name}", first))

    def kept(self) -> dict[str, Tensor]:
        """Weights and buffers by their names in a checkpoint; copies."""
        tensors = {f"model.{name}": value for name, value in self.state().items()}
        for layer, module, others in zip(self._model.layers, self.layers, self._buffers, strict=True):
            for replica, buffers in enumerate(others, start=1):
                tensors |= {f"buffers.{replica}.{layer.name}.{name}": buffer.clone() for (name, _), buffer in
                            zip(module.named_buffers(), buffers, strict=True)}
        return tensors

    def of_stage(self, stage: int) -> dict[str, nn.Parameter]:
        """What the optimizer of a stage steps."""
        return {name: p for name, p in self.masters.items() if self.stage_of[name] == stage}

    @torch.no_grad()
    def take_over(self) -> None:
        """Make the parameters what the masters are, rounded where the layers are."""
        if self.masters is not self.parameters:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])

    def split_sides(self) -> dict[str, nn.Parameter]:
        """Put a parameter of its own into the layers for every side of a tie, so that it gets a gradient of its own."""
        sides = {side: nn.Parameter(self.parameters[owner].detach().clone()) for side, owner in self.owners.items()}
        for layer, names in zip(self.layers, self.names, strict=True):
            for own, name in names.items():
                if name in sides:
                    set_parameter(layer, own, sides[name])
        return sides

    @contextmanager
    def replica(self, microbatch: int) -> Iterator[None]:
        """Have in the layers the buffers of the replicas that work on a microbatch."""
        self._turn(microbatch)
        yield
        self._turn(microbatch)

    def state(self) -> dict[str, Tensor]:
        """Parameters, unrounded, and buffers as ``Pipeline.state_dict`` names them, of the kind they had before they
        were rounded; buffers are replica 0's."""
        return {name: self.masters.get(name, value).detach().to(self._kinds[name], copy=True)
                for name, value in self._held().items()}

    def _held(self) -> dict[str, Tensor]:
        return {f"{layer.name}.{name}": value for layer in self._model.layers
                for name, value in self._modules[layer.name].state_dict().items() if name not in layer.ties}

    @torch.no_grad()
    def _turn(self, microbatch: int) -> None:
        """Exchange the buffers in the layers with those of the replicas at work."""
        for layer, stage, others in zip(self.layers, self._stage, self._buffers, strict=True):
            replica = microbatch % self.widths[stage]
            if replica > 0:
                for buffer, other in zip(layer.buffers(), others[replica - 1], strict=True):
                    kept = buffer.clone()
                    buffer.copy_(other)
                    other.copy_(kept)

    def _named(self) -> dict[str, nn.Parameter]:
        named: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for layer in self._model.layers:
            for name, parameter in self._modules[layer.name].named_parameters():
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"{layer.name}.{name}"] = parameter
        return named

    def _names(self, sides: Mapping[str, str]) -> list[dict[str, str]]:
        canonical = {id(p): name for name, p in self.parameters.items()}
        return [{name: sides.get(f"{layer.name}.{name}", canonical[id(p)])
                 for name, p in self._modules[layer.name].named_parameters(remove_duplicate=False)
                 if id(p) in canonical} for layer in self._model.layers]
