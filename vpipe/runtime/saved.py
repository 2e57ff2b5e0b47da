"""What a run must keep to go on as if it had not stopped, by names that say nothing of how it was cut.

Each kind of state is a :class:`Part`: it gives its tensors of this process, and takes those that it wants of
all there are. So a checkpoint is one flat table, whatever the partition, the widths and the transport:

    model.<layer>.<parameter or buffer>                 a tied weight once, under its owner's name
    optim.<layer>.<parameter>.<state>                   ...#int and ...#float: a number, without dimensions
    buffers.<replica>.<layer>.<buffer>                  of replicas from 1 on; those of replica 0 are the model's
    feedback.<layer behind the cut>.<replica>.<tensor>  what coding a gradient lost where it left that replica
    loss_scale.<first layer of the stage>.value, .good  of fp16; with a flush one for all, layer 0's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vpipe.errors import UserError, counted
from vpipe.model.split import StageSpec
from vpipe.runtime.compressed import Compressed
from vpipe.runtime.scaling import LossScale
from vpipe.runtime.stage import Stage
from vpipe.runtime.worker import Worker
from vpipe.schedules.size import Placement

NUMBERS = {"int": torch.int64, "float": torch.float64}
"""Kinds of numbers in an optimizer's state, and what holds each exactly."""

_SET_ANEW = ("params", "lr", "initial_lr")
"""Entries of a parameter group that follow from the run's arguments and its step."""


class Part(Protocol):
    """One kind of state."""

    def state(self) -> dict[str, Tensor]:
        """The tensors that this process has to keep, by their names in a checkpoint; no copies.

        Raises:
            UserError: some of it is nothing that a checkpoint can hold.
        """

    def wants(self, name: str) -> bool:
        """Whether this process takes up a tensor of this name."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up those of the wanted tensors that there are; they are copied.

        Raises:
            UserError: one is missing that cannot be done without.
        """


class Held(NamedTuple):
    """A stage on a rank of this process."""

    worker: Worker
    stage: Stage
    replica: int


def parts_of(workers: Mapping[int, Worker], specs: Sequence[StageSpec], placement: Placement) -> list[Part]:
    """All parts of the stages on these ranks, in the order in which they are to be loaded."""
    held = [Held(worker, stage, placement[number].index(rank))
            for rank, worker in workers.items() for number, stage in worker.stages.items()]
    return [ModelState(held), OptimizerState(held), ReplicaBuffers(held), Feedback(held, specs), LossScales(held)]


class ModelState:
    """Parameters and buffers: the first replica's, for all of them."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held

    def state(self) -> dict[str, Tensor]:
        return {f"model.{name}": value for each in self._held if each.replica == 0
                for name, value in each.stage.state().items()}

    def wants(self, name: str) -> bool:
        return name in self._names

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        missing = [name.removeprefix("model.") for name in self._names if name not in tensors]
        if missing:
            raise UserError(f"{counted(len(missing), 'tensor')} of the model missing in the checkpoint: "
                            f"{', '.join(missing[:3])}{', ...' * (len(missing) > 3)}",
                            hint="it was made of another model")
        for each in self._held:
            each.stage.load({name: tensors[f"model.{name}"] for name in each.stage.state()})

    @cached_property
    def _names(self) -> dict[str, None]:
        """Of what the stages here have, in order; asked for late, since not every model can be saved."""
        return {f"model.{name}": None for each in self._held for name in each.stage.state()}


class OptimizerState:
    """What the optimizers keep of every parameter they have stepped; equal on all replicas, so the first one's."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._options = {id(optimizer): _options(optimizer) for optimizer, _, _ in self._all()}

    def state(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for optimizer, masters, replica in self._all():
            self._check_options(optimizer)
            if replica == 0:
                for name, master in masters.items():
                    for key, value in optimizer.state.get(master, {}).items():
                        named.update([_as_tensor(f"optim.{name}.{key}", value)])
        return named

    def wants(self, name: str) -> bool:
        return any(owner in masters for _, masters, _ in self._all() for owner, _ in _readings(name))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for optimizer, masters, _ in self._all():
            groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
            for name, tensor in tensors.items():
                for owner, kept in _readings(name):
                    if owner in masters:
                        key, value = _as_value(kept, tensor, masters[owner], groups.get(masters[owner], {}))
                        optimizer.state[masters[owner]][key] = value

    def _all(self) -> Iterator[tuple[torch.optim.Optimizer, Mapping[str, nn.Parameter], int]]:
        for each in self._held:
            optimizer = each.worker.update.optimizers[each.stage.spec.index]
            if optimizer is not None:
                yield optimizer, each.stage.weights.masters, each.replica

    def _check_options(self, optimizer: torch.optim.Optimizer) -> None:
        for before, now in zip(self._options[id(optimizer)], _options(optimizer), strict=True):
            changed = [key for key in now if key not in before or before[key] != now[key]]
            if changed:
                raise UserError(f"{type(optimizer).__name__} changes '{changed[0]}' of its parameter groups as it "
                                "steps, which a checkpoint does not hold",
                                hint="choose an optimizer that keeps its state per parameter")


class ReplicaBuffers:
    """The buffers of replicas from 1 on: their own microbatches made them. A new replica has those of the first."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = [each for each in held if each.replica > 0]

    def state(self) -> dict[str, Tensor]:
        return dict(self._all())

    def wants(self, name: str) -> bool:
        return name in self._names

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, buffer in self._all():
            if name in tensors:
                buffer.copy_(tensors[name])

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._all())

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        for each in self._held:
            kept = each.stage.state()
            for layer, module in each.stage.modules.items():
                for name, buffer in module.named_buffers(prefix=each.stage.layer_names[layer]):
                    if name in kept:
                        yield f"buffers.{each.replica}.{name}", buffer


class Feedback:
    """What coding gradients lost, where they leave a stage; nothing where another cut is, or none was."""

    def __init__(self, held: Sequence[Held], specs: Sequence[StageSpec]) -> None:
        self._held, self._specs = held, specs

    def state(self) -> dict[str, Tensor]:
        return {f"{prefix}{number}": lost for prefix, cut, coder in self._all()
                for number, lost in coder.lost(cut).items()}

    def wants(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix, _, _ in self._all())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for prefix, cut, coder in self._all():
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    coder.has_lost(cut, int(name.removeprefix(prefix)), tensor)

    def _all(self) -> Iterator[tuple[str, int, Any]]:
        for each in self._held:
            number = each.stage.spec.index
            if number > 0 and isinstance(each.worker.transport, Compressed):
                layer = self._specs[number].layers.start
                yield f"feedback.{layer}.{each.replica}.", number - 1, each.worker.transport.coder


class LossScales:
    """The scales of losses that training has found, and for how many updates in a row they were good.

    Another partition, or a flush where there was none: a stage goes on with that of the last layer at or before its
    first one.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for layer, replica, scale in self._all() if replica == 0 for name, tensor in (
            (f"loss_scale.{layer}.value", torch.tensor(scale.value, dtype=torch.float64)),
            (f"loss_scale.{layer}.good", torch.tensor(scale.good)))}

    def wants(self, name: str) -> bool:
        return name.startswith("loss_scale.") and any(True for _ in self._all())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        layers = sorted({int(name.split(".")[1]) for name in tensors})
        for layer, _, scale in self._all():
            if before := [other for other in layers if other <= layer]:
                scale.value = float(tensors[f"loss_scale.{before[-1]}.value"])
                scale.good = int(tensors[f"loss_scale.{before[-1]}.good"])

    def _all(self) -> Iterator[tuple[int, int, LossScale]]:
        """Layers, replicas and scales; one for all stages is in the first one, and on ranks without that has no
        replica that keeps it."""
        for each in self._held:
            scaling = each.worker.update.scaling
            if scaling is not None and scaling[each.stage.spec.index].dynamic:
                number, first = each.stage.spec.index, each.stage.spec.layers.start
                if scaling.travels:
                    yield first, each.replica, scaling[number]
                else:
                    yield 0, each.replica if number == 0 else -1, scaling[number]


def _readings(name: str) -> Iterator[tuple[str, str]]:
    """The ways to read ``optim.<layer>.<parameter>.<state>``: any of the three may hold dots."""
    _, *words = name.split(".")
    if name.startswith("optim."):
        for cut in range(1, len(words)):
            yield ".".join(words[:cut]), ".".join(words[cut:])


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What parameter groups hold beside parameters and learning rates: numbers that should stay as they are."""
    return [{key: value for key, value in group.items() if key not in _SET_ANEW} for group in optimizer.param_groups]


def _as_tensor(name: str, value: object) -> tuple[str, Tensor]:
    """An entry of an optimizer's state as a checkpoint holds it."""
    if isinstance(value, Tensor):
        return name, value
    if type(value) is int or type(value) is float:
        kind = type(value).__name__
        return f"{name}#{kind}", torch.tensor(value, dtype=NUMBERS[kind])
    raise UserError(f"the optimizer keeps {type(value).__name__} {value!r} as '{name}'",
                    hint="a checkpoint holds tensors and numbers: choose an optimizer that keeps nothing else")


def _as_value(key: str, tensor: Tensor, parameter: nn.Parameter, group: Mapping[str, Any]) -> tuple[str, object]:
    """The inverse of :func:`_as_tensor`, on the device where torch's own optimizers want it."""
    name, _, kind = key.partition("#")
    if kind:
        return name, tensor.item()
    on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
    return name, tensor.to("cpu" if on_host else parameter.device, copy=True)
