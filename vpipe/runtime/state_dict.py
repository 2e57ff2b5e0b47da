"""Save and load the state of training under names that are independent of the partition.

Each kind of state is a :class:`StatePart`: it returns its tensors of this process, and loads those of a checkpoint that
this process needs. So a checkpoint is one flat table, and loads into any other partition, width and transport:

    model.<layer>.<parameter or buffer>                 a tied weight once, under its owner's name
    optim.<layer>.<parameter>.<state>                   ...#int and ...#float: a number, without dimensions
    optim.<layer>.<parameter>.group.lr, .group.initial_lr  #float; of its parameter group, where that was changed
    buffers.<replica>.<layer>.<buffer>                  of replicas from 1 on; those of replica 0 are the model's
    loss.<replica>.<layer>.<buffer>                     of the loss of a sequential model, which is not in its state
    loss_scale.0.value, .good                           of fp16, where it is found while training
    delay_correction.<layer>.<parameter>.last_change, .factor  where late gradients are corrected
    average.<layer>.<parameter>                         where an average follows the weights
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vpipe.arguments import shown
from vpipe.checkpoint.manifest import TensorKind, factor_of, last_change_of
from vpipe.errors import UserError, counted
from vpipe.model.sequential import loss_buffers
from vpipe.runtime.companions import Extrapolation
from vpipe.runtime.sharded_tensors import parted
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import RATES, StageOptimizer, first_of, is_of_torch
from vpipe.runtime.weight_versions import WeightVersions
from vpipe.runtime.worker import Worker
from vpipe.schedules.assignment import Placement

NUMBERS = {"int": torch.int64, "float": torch.float64}
"""Kinds of numbers in an optimizer's state, and the dtype that holds each exactly."""


class StatePart(ABC):
    """One kind of state."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors that this process saves, by their names in a checkpoint; no copies.

        Raises:
            UserError: some of the state is nothing that a checkpoint can hold.
        """

    def wants(self, name: str) -> bool:
        """Return whether this process loads the tensor of this name."""
        return name in self.names

    @cached_property
    def names(self) -> dict[str, Tensor]:
        """Return the names that this process loads, with empty tensors of the shapes and dtypes that it has; on demand,
        since not every model can be saved."""
        return {name: _outline(tensor) for name, tensor in self.state().items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse what :meth:`load` could not copy in, before anything is copied.

        Raises:
            UserError: a tensor that is needed is missing, or one has another shape or kind of numbers.
        """
        for name in filter(tensors.__contains__, self.names):
            own, found = self.names[name], tensors[name]
            if not isinstance(found, Tensor):
                raise UserError(f"'{name}' is {shown(found)}, not a tensor", hint="give what state_dict() returned")
            if found.shape != own.shape or not torch.can_cast(found.dtype, own.dtype):
                raise UserError(f"'{name}' is {TensorKind.of(found)}, but {TensorKind.of(own)} in this pipeline",
                                hint="give the state of a pipeline with the same model")

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in the wanted tensors, which all ranks have checked."""


class LocalStage(NamedTuple):
    """A stage on a rank of this process."""

    worker: Worker
    stage: Stage
    replica: int


def state_parts(workers: Mapping[int, Worker], placement: Placement) -> list[StatePart]:
    """Return all parts of the stages on these ranks, in the order in which they are to be loaded."""
    stages = [LocalStage(worker, stage, placement[number].index(rank))
            for rank, worker in workers.items() for number, stage in worker.stages.items()]
    return [ModelState(stages), OptimizerState(stages), NamedBuffers(stages), LossScale(stages), CompanionState(stages)]


class ModelState(StatePart):
    """Parameters and buffers; the first replica saves them for all, or the one that steps a parameter."""

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        self._stages = stages

    def state(self) -> dict[str, Tensor]:
        return {f"model.{name}": value for each in self._stages
                for name, value in each.stage.own_state(each.replica).items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        if missing := [name.removeprefix("model.") for name in self.names if name not in tensors]:
            raise UserError(f"{counted(len(missing), 'tensor')} of the model missing in the checkpoint: "
                            f"{first_of(missing)}", hint="it was made of another model")
        super().check(tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for each in self._stages:
            each.stage.load({name: tensors[f"model.{name}"] for name in each.stage.state()})

    @cached_property
    def names(self) -> dict[str, Tensor]:
        return {f"model.{name}": _outline(value) for each in self._stages for name, value in each.stage.state().items()}


class OptimizerState(StatePart):
    """The state that optimizers have per parameter; of those that all replicas step, the first one saves it."""

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        self._of_replicas = [(each.worker.optimizer_steps.optimizers[each.stage.spec.index], each.stage.weights,
                              each.replica) for each in stages]

    def state(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for optimizers, weights, replica in self._of_replicas:
            optimizers.check_state()
            if weights.owned is not None or replica == 0:
                named |= optimizer_entries(optimizers, weights)
        return named

    def wants(self, name: str) -> bool:
        return any(owner in optimizers.of_parameter and (weights.owns(owner) or entry.startswith("group."))
                   for optimizers, weights, _ in self._of_replicas for owner, entry in _readings(name)) or any(
            name.removeprefix("model.") in optimizers.of_parameter for optimizers, _, _ in self._of_replicas)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        for optimizers, weights, _ in self._of_replicas:
            list(_rates(optimizers, tensors))
            for owner, entry, tensor in _entries(optimizers, weights, tensors):
                shape, (optimizer, _) = optimizers.parameters[owner].shape, optimizers.of_parameter[owner]
                fits = tensor.dim() in (0, len(shape)) and all(  # such as a number per row
                    size in (1, whole) for size, whole in zip(tensor.shape, shape, strict=False))
                if tensor.numel() != 1 if "#" in entry else is_of_torch(optimizer) and not fits:
                    raise UserError(f"'optim.{owner}.{entry}' is {TensorKind.of(tensor)}, of a parameter of shape "
                                    f"{list(shape)}", hint="give the state of a pipeline with the same model")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for optimizers, weights, _ in self._of_replicas:
            for group, key, rate in _rates(optimizers, tensors):
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(rate)
                else:
                    group[key] = rate
            for owner, entry, tensor in _entries(optimizers, weights, tensors):
                parameter, (optimizer, number) = optimizers.parameters[owner], optimizers.of_parameter[owner]
                saved = tensors.get(f"model.{owner}")
                if tensor.dim() and saved is not None and saved.dtype == tensor.dtype != parameter.dtype:
                    tensor = tensor.to(parameter.dtype)  # the run goes on with weights of another dtype
                key, value = _as_value(entry, tensor, parameter, optimizer.param_groups[number])
                optimizer.state[parameter][key] = value


def optimizer_entries(optimizers: StageOptimizer, weights: WeightVersions) -> dict[str, Tensor]:
    """Return the state that a stage's optimizers have of the parameters that they step, by its names in a checkpoint.
    """
    named: dict[str, Tensor] = {}
    for name, (optimizer, number) in optimizers.of_parameter.items():
        if not weights.owns(name):
            continue
        group = optimizer.param_groups[number]
        for key, value in optimizer.state.get(optimizers.parameters[name], {}).items():
            named.update([_as_tensor(f"optim.{name}.{key}", value)])
        for key in RATES if optimizers.rescheduled else ():
            if group.get(key) is not None:
                named.update([_as_tensor(f"optim.{name}.group.{key}", float(group[key]))])
    return named


class NamedBuffers(StatePart):
    """Buffers that are not the model's: of replicas from 1 on, as their own microbatches made them; and of the loss of
    a sequential model, of every replica. Those that a checkpoint lacks keep their values: a new replica has those of
    the first."""

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        self._stages = stages

    def state(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for each in self._stages:
            saved = each.stage.state() if each.replica > 0 else {}
            named |= {f"buffers.{each.replica}.{name}": buffer for name, buffer in each.stage.named_buffers()
                      if name in saved}
        for each in self._stages:
            named |= {f"loss.{each.replica}.{each.stage.layer_names[layer]}.{name}": buffer
                      for layer, module in each.stage.modules.items() for name, buffer in loss_buffers(module).items()}
        return named

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, buffer in self.state().items():
            if name in tensors:
                buffer.copy_(parted(tensors[name], buffer))


class LossScale(StatePart):
    """The dynamic loss scale of all stages, with the number of good updates in a row; stage 0 saves it.

    Older checkpoints of schedules without a flush have one per stage, of which that of layer 0 counts.
    """

    VALUE, GOOD = "loss_scale.0.value", "loss_scale.0.good"

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        scalers = [each.worker.optimizer_steps.scaler for each in stages]
        self._scalers = [scaler for scaler in scalers if scaler is not None and scaler.dynamic]
        self._saves = any(each.replica == 0 and each.stage.spec.index == 0 for each in stages)

    def state(self) -> dict[str, Tensor]:
        if not self._scalers or not self._saves:
            return {}
        return {self.VALUE: torch.tensor(self._scalers[0].value, dtype=torch.float64, device="cpu"),
                self.GOOD: torch.tensor(self._scalers[0].good, device="cpu")}

    def wants(self, name: str) -> bool:
        return name in (self.VALUE, self.GOOD) and bool(self._scalers)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for scaler in self._scalers if self.VALUE in tensors else ():
            scaler.value, scaler.good = float(tensors[self.VALUE]), int(tensors.get(self.GOOD, 0))


class CompanionState(StatePart):
    """The tensors of companions; the first replica saves them, or the one that steps the parameter. One that a
    checkpoint lacks begins with the weights, which are loaded before.

    The factor of a look-ahead is there, too: in another partition a parameter has that of its stage. Where it is not
    the checkpoint's, 0 without a correction, ``load`` changes the weights: those without the look-ahead stay.

    Attributes:
        other_factors: of the latest load, by name of a parameter of a first replica: ``3 -> 0.75``; a factor that the
            checkpoint does not state is ``?``, and leaves the weights as they are.
    """

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        self._stages = [(each, each.worker.optimizer_steps.companions[each.stage.spec.index]) for each in stages]
        self.other_factors: dict[str, str] = {}

    def state(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for each, companions in self._stages:
            own = each.stage.own_state(each.replica)
            for companion in companions.values():
                for name, value in companion.named().items():
                    if name in own:
                        named[companion.entry(name)] = value
                        if isinstance(companion, Extrapolation):
                            named[factor_of(name)] = torch.tensor(companion.factor, dtype=torch.float64, device="cpu")
        return named

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.other_factors = {}
        for each, companions in self._stages:
            extrapolation = companions.get("uncorrected")
            factor = extrapolation.factor if isinstance(extrapolation, Extrapolation) else 0.0
            self._change_look_ahead(each, factor, tensors)
            for companion in companions.values():
                companion.begin()
                for name, value in companion.named().items():
                    if (saved := tensors.get(companion.entry(name))) is not None:
                        value.copy_(parted(saved, value))

    def _change_look_ahead(self, each: LocalStage, factor: float, tensors: Mapping[str, Tensor]) -> None:
        """Let the weights of a stage, also those that other replicas step, look ahead by another factor."""
        stepped = each.worker.optimizer_steps.optimizers[each.stage.spec.index].of_parameter
        state, trained, changed = each.stage.state(), each.stage.trained_names(), dict[str, Tensor]()
        for name, value in state.items():
            saved, stated = tensors.get(last_change_of(name)), tensors.get(factor_of(name))
            now = factor if trained.get(name) in stepped else 0.0
            before = 0.0 if saved is None else None if stated is None else stated.item()
            if before == now:
                continue
            if each.replica == 0:
                self.other_factors[name] = f"{'?' if before is None else f'{before:.3g}'} -> {now:.3g}"
            if saved is not None and before is not None:
                changed[name] = torch.add(value, parted(saved.to(value.device, value.dtype), value),
                                          alpha=now - before)
        if changed:
            each.stage.load(state | changed)

    @cached_property
    def names(self) -> dict[str, Tensor]:
        return {of(name): _outline(value.new_empty(()) if of is factor_of else value)
                for each, companions in self._stages for name, value in each.stage.state().items()
                for of in (last_change_of, factor_of, *(companion.entry for companion in companions.values()))}


def _outline(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _readings(name: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to read ``optim.<layer>.<parameter>.<state>``: any of the three may hold dots."""
    _, *words = name.split(".")
    if name.startswith("optim."):
        for cut in range(1, len(words)):
            yield ".".join(words[:cut]), ".".join(words[cut:])


def _entries(optimizers: StageOptimizer, weights: WeightVersions,
             tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the state of the parameters that are stepped here: name, entry, and its tensor."""
    for name, tensor in tensors.items():
        for owner, entry in _readings(name):
            if owner in optimizers.of_parameter and weights.owns(owner) and not entry.startswith("group."):
                yield owner, entry, tensor


def _rates(optimizers: StageOptimizer, tensors: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yield the parameter groups with the learning rates that their parameters had, where they had been changed.

    Raises:
        UserError: the parameters of a group had different ones.
    """
    for key in RATES:
        found: dict[int, dict[float | None, str]] = defaultdict(dict)
        for name, (optimizer, number) in optimizers.of_parameter.items():
            rate = tensors.get(f"optim.{name}.group.{key}#float")
            found[id(optimizer.param_groups[number])].setdefault(None if rate is None else rate.item(), name)
        for group in optimizers.groups:
            rates = found[id(group)]
            if len(rates) > 1:
                (first, one), (second, other), *_ = rates.items()
                raise UserError(f"'{one}' and '{other}' are in one parameter group, but the checkpoint has them with "
                                f"different learning rates ({key}): {first or 'as made'} and {second or 'as made'}",
                                hint="put them into different parameter groups, or keep the partition that saved")
            if (only := next(iter(rates), None)) is not None:
                yield group, key, only


def _as_tensor(name: str, value: object) -> tuple[str, Tensor]:
    """Return an entry of an optimizer's state as a checkpoint holds it."""
    if isinstance(value, Tensor):
        return name, value
    if type(value) is int or type(value) is float:
        kind = type(value).__name__
        return f"{name}#{kind}", torch.tensor(value, dtype=NUMBERS[kind], device="cpu")
    raise UserError(f"the optimizer keeps {type(value).__name__} {value!r} as '{name}'",
                    hint="a checkpoint holds tensors and numbers: choose an optimizer that keeps nothing else")


def _as_value(key: str, tensor: Tensor, parameter: nn.Parameter, group: Mapping[str, Any]) -> tuple[str, object]:
    """Return the entry that :func:`_as_tensor` got, on the device where torch's own optimizers want it."""
    name, _, kind = key.partition("#")
    if kind:
        return name, tensor.item()
    on_host = name in ("step", "mu_product") and not (group.get("capturable") or group.get("fused"))
    return name, parted(tensor.to("cpu" if on_host else parameter.device, copy=True),
                        tensor if on_host or not tensor.dim() else parameter)
