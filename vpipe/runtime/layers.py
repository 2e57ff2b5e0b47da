"""The layers of a stage: built on its device, called in its precision, each under a seed of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from vpipe.errors import UserError, VpipeError
from vpipe.model.layer import (
    LOSS,
    Layer,
    Model,
    check_alike,
    kind_of,
    parameter_of,
    seed_of,
    set_parameter,
    share_modules,
)
from vpipe.model.sequential import rounded_module
from vpipe.model.split import StageSpec
from vpipe.runtime.activations import DropoutKey, Record, Span
from vpipe.runtime.layer_errors import Computed, forward_error
from vpipe.runtime.parameters import has_hooks, replace_parameter
from vpipe.runtime.precision import Precision
from vpipe.runtime.split_backward import Interception
from vpipe.runtime.weight_grad_store import WeightHalf
from vpipe.runtime.weight_versions import Slot, Weights


class Layers:
    """Builds the layers of a stage and runs them forward; what autograd makes of that is the stage's.

    Attributes:
        modules, names, ties: by the layer's number in the model.
        rounds_weights: how weights are rounded, where the precision holds them reduced; None elsewhere.

    Args:
        model, spec, seed, device, precision: see :class:`~vpipe.runtime.stage.Stage`.
    """

    def __init__(self, model: Model, spec: StageSpec, *, seed: int, device: torch.device, precision: Precision) -> None:
        self._spec, self._run_seed = spec, seed
        rounding = None if precision.dtype is None else Rounding(precision.dtype)
        self.rounds_weights = rounding if precision.pure else None
        self._compute = self._call if rounding is None else partial(self._call_reduced, rounding)
        self._autocasts = precision.autocasts
        self._autocast = torch.autocast(device.type, precision.dtype) if precision.autocasts else None
        self.modules = {i: model.layers[i].materialize(i, seed).to(device) for i in spec.layers}
        self._generators = generators_of(device)
        self.names = {i: model.layers[i].name for i in spec.layers}
        self.ties = {i: model.layers[i].ties for i in spec.layers}
        self._share_modules(model)
        share_ties(self.modules, self.names, self.ties)
        self._split = {i for i, module in self.modules.items()
                       if any(p.requires_grad for p in module.parameters())
                       and not any(map(_sees_its_operation, module.modules()))}

    def _share_modules(self, model: Model) -> None:
        named = {self.names[i]: module for i, module in self.modules.items()}
        share_modules(named, {self.names[i]: model.layers[i].shared for i in self.modules})
        self.modules = {i: named[name] for i, name in self.names.items()}

    def round_weights(self) -> dict[int, Tensor] | None:
        """Round parameters and buffers if the precision wants it; what the parameters were before, by their ids."""
        return None if self.rounds_weights is None else self.rounds_weights.round(
            map(rounded_module, self.modules.values()))

    def fields_read(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fields that the stage reads, as its layers read them."""
        if self.rounds_weights is not None:
            return {name: self.rounds_weights.rounded(fields[name]) for name in self._spec.fields}
        return {name: fields[name] for name in self._spec.fields}

    def run(self, span: Span, inputs: Mapping[str, Tensor], record: Record,
            half: WeightHalf | None = None, again: bool = False) -> dict[str, Tensor]:
        """One span forward: its outputs, by name.

        Args:
            inputs: leaves; an evaluation's may be changed in place.
            half: where weight gradients that can wait go, if the backward comes in two halves.
            again: whether it ran on these inputs before.

        Raises:
            UserError: a layer changes a field in place, or an input that it did not change at first, or does not return
                the tensors that it is to return.
            RunError: a layer raised an error.
        """
        training = torch.is_grad_enabled()
        given = span.effects.given(inputs, again) if training else inputs
        tensors = {**record.fields, **given}
        before = [(name, t, t._version) for name, t in tensors.items() if training or name not in inputs]
        try:
            for i, layer, module in span.layers:
                self._seed(record.key, i)
                # Not where nothing is trained: modules may compute other numbers when they see that they are watched.
                with nullcontext() if half is None or i not in self._split else Interception(half, self._autocasts):
                    result = self._compute(layer, module, [tensors[name] for name in layer.inputs])
                tensors.update(zip(layer.outputs, result, strict=True))
        except VpipeError:
            raise
        except Exception as error:
            raise forward_error(i, layer, {name: tensors[name] for name in layer.inputs}, error) from error
        changed = [name for name, tensor, version in before if tensor._version != version]
        if any(given.get(name) is inputs.get(name) for name in changed):
            raise self._in_place(span.layers[0][1].name)
        if training:
            span.effects.ran(inputs, given, changed)
        # What nobody touched goes on as it came where the layers got copies: those would be one more. An alias goes on
        # itself, so that gradients from beyond the span are added first, as in one graph.
        return {name: inputs[name] if span.recomputed and tensors[name] is given.get(name)
                and name not in span.effects.inputs else tensors[name] for name in span.outputs}

    @contextmanager
    def noting(self, computed: list[Computed]) -> Iterator[None]:
        """Note what each layer returns, in order."""
        compute = self._compute
        numbers = {name: number for number, name in self.names.items()}

        def noted(layer: Layer, module: nn.Module, arguments: list[Tensor]) -> tuple[Tensor, ...]:
            outputs = compute(layer, module, arguments)
            computed.append(Computed(numbers[layer.name], layer, outputs))
            return outputs

        self._compute = noted
        try:
            yield
        finally:
            self._compute = compute

    def _call(self, layer: Layer, module: nn.Module, arguments: list[Tensor]) -> tuple[Tensor, ...]:
        try:
            result = module(*arguments)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise self._in_place(layer.name) from error
            raise
        outputs = result if isinstance(result, tuple) else (result,)
        if len(outputs) != len(layer.outputs) or not all(isinstance(t, Tensor) for t in outputs):
            kinds = ", ".join(type(t).__name__ for t in outputs)
            raise UserError(f"layer '{layer.name}' returned {len(outputs)} value(s) ({kinds}) for its "
                            f"{len(layer.outputs)} outputs {list(layer.outputs)}",
                            hint="forward must return one tensor per name in outputs, as a tuple if there are several")
        return outputs

    def _call_reduced(self, rounding: Rounding, layer: Layer, module: nn.Module,
                      arguments: list[Tensor]) -> tuple[Tensor, ...]:
        """As :meth:`_call`, in the reduced precision. The autocast is the layer's own, and ends with it: weights that
        layers share are cast by each of them, so that gradients do not depend on which of them are in one stage."""
        with self._autocast or nullcontext():
            outputs = self._call(layer, module, arguments)
        return tuple(rounding.handed_on(name, t) for name, t in zip(layer.outputs, outputs, strict=True))

    def _in_place(self, layer: str) -> UserError:
        return UserError(f"stage {self._spec.index}, which starts at layer '{layer}', changes its input in place",
                         hint="use the operation that is not in place there (inplace=False): "
                              "the input is needed again, by recompute or by another layer")

    def _seed(self, key: DropoutKey, layer: int) -> None:
        seed = seed_of(self._run_seed, *key, layer)
        for generator in self._generators:
            generator.manual_seed(seed)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leaves the process's random state as it was: data loading must not depend on how layers are cut."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Every module in evaluation mode, and back to the mode it was in."""
        modes = {module: module.training for layer in self.modules.values() for module in layer.modules()}
        for layer in self.modules.values():
            layer.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _sees_its_operation(module: nn.Module) -> bool:
    """Whether hooks are given all gradients of a module's last operation (``register_backward_hook``, deprecated)."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers on a device draw from: the host's, and the GPU's own.

    Each rank seeds them for every microbatch, so that a mask does not depend on which GPU draws it.
    """
    if device.type == "cpu":
        return [torch.default_generator]
    assert device.type == "cuda", f"layers on {device} draw from a generator that nobody would seed"
    assert device.index is not None, "any other GPU would draw from another generator than the one that is seeded"
    torch.cuda.init()  # type: ignore[no-untyped-call] # makes them
    return [torch.default_generator, torch.cuda.default_generators[device.index]]


def share_ties(modules: Mapping[int, nn.Module], names: Mapping[int, str],
               ties: Mapping[int, Mapping[str, str]]) -> None:
    """Make tied parameters one object where both layers are in the stage.

    Args:
        modules: by layer number.
        names: of the layers.
        ties: per layer, own parameter -> the other layer's, ``"<layer>.<parameter>"``.

    Raises:
        UserError: one does not exist, or they are of different shapes or dtypes; a parameter has hooks, and the one
            that takes its place has none.
    """
    at = {name: i for i, name in names.items()}
    for i, tied in ties.items():
        for own, target in tied.items():
            owner = next((name for name in at if target.startswith(name + ".")), None)
            if owner is None:
                parameter_of(names[i], modules[i], own)
            else:
                shared = parameter_of(owner, modules[at[owner]], target[len(owner) + 1:])
                before = parameter_of(names[i], modules[i], own)
                check_alike({f"{names[i]}.{own}": kind_of(before), target: kind_of(shared)})
                set_parameter(modules[i], own, shared)
                if before is not shared:
                    if has_hooks(before) and not has_hooks(shared):
                        raise UserError(f"'{names[i]}.{own}' has hooks, but '{target}' takes its place: they are tied",
                                        hint=f"register the hooks on '{target}'")
                    replace_parameter(before, f"{names[i]}.{own}")


def check_apart(stages: Iterable[tuple[Mapping[int, nn.Module], Mapping[int, str]]]) -> None:
    """Refuse stages of one process that share parameters, as they could not in processes of their own.

    Args:
        stages: of each the modules and the names of its layers, by their numbers; before parameters are replaced.

    Raises:
        UserError: one that is trained is in a layer of another stage, or of another rank, too.
    """
    seen: dict[int, str] = {}
    for modules, names in stages:
        mine = {id(parameter): f"{names[i]}.{name}" for i, module in modules.items()
                for name, parameter in module.named_parameters() if parameter.requires_grad}
        for shared in mine.keys() & seen:
            raise UserError(f"'{mine[shared]}' and '{seen[shared]}' are one parameter, but on different stages or "
                            "ranks, where each is trained by itself",
                            hint="let every build function make a module of its own, and tie them: "
                                 "Layer(..., ties={...})")
        seen |= mine


def collect(modules: Mapping[int, nn.Module], names: Mapping[int, str], borrowed: Mapping[str, tuple[int, str]],
            unrounded: Mapping[int, Tensor] | None = None) -> tuple[Weights, dict[int, Weights]]:
    """Own trainable parameters, and those borrowed from other stages (by owner), with the slots that hold them.

    Args:
        modules, names: see :func:`share_ties`.
        borrowed: see :class:`~vpipe.model.split.StageSpec`.
        unrounded: of rounded parameters, what they were before, by their ids.

    Raises:
        UserError: a tied parameter is frozen.
    """
    first: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    slots: dict[str, list[Slot]] = {}
    for i, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            full = f"{names[i]}.{name}"
            if not parameter.requires_grad:
                if full in borrowed:
                    raise UserError(f"'{full}' is tied to '{borrowed[full][1]}' but frozen",
                                    hint="let it require a gradient, or leave out the tie")
                continue
            path, _, leaf = name.rpartition(".")
            canonical = first.setdefault(id(parameter), full)
            parameters.setdefault(canonical, parameter)
            slots.setdefault(canonical, []).append((module.get_submodule(path), leaf))
    lent: dict[int, dict[str, nn.Parameter]] = {}
    lent_slots: dict[int, dict[str, list[Slot]]] = {}
    for own, (owner, target) in borrowed.items():
        if own not in parameters:
            continue  # shares its place with a name already seen
        # Several parameters here may be tied to the same one there: they are one value.
        lent.setdefault(owner, {}).setdefault(target, parameters.pop(own))
        lent_slots.setdefault(owner, {}).setdefault(target, []).extend(slots.pop(own))
    masters = None if unrounded is None else {
        name: unrounded[id(p)] if id(p) in unrounded else p.data.clone() for name, p in parameters.items()}
    return (Weights(parameters, slots, masters),
            {owner: Weights(lent[owner], lent_slots[owner]) for owner in sorted(lent)})


@dataclass(frozen=True)
class Rounding:
    """To a reduced precision, and back. Other kinds of numbers, such as float64 and integers, stay what they are."""

    dtype: torch.dtype

    def handed_on(self, name: str, tensor: Tensor) -> Tensor:
        """A layer's output as the next layer finds it: rounded; the loss in fp32."""
        return self.widened(tensor) if name == LOSS else self.rounded(tensor)

    def rounded(self, tensor: Tensor) -> Tensor:
        """The tensor in the reduced precision, if it is fp32."""
        return tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor

    def widened(self, tensor: Tensor) -> Tensor:
        """The tensor in fp32, if it has the reduced precision."""
        return tensor.float() if tensor.dtype is self.dtype else tensor

    def round(self, modules: Iterable[nn.Module]) -> dict[int, Tensor]:
        """Round parameters and buffers in place; what the parameters were before, by their ids."""
        before: dict[int, Tensor] = {}
        for module in modules:
            before |= {id(p): p.data for p in module.parameters() if p.dtype is torch.float32}
            for tensor in chain(module.parameters(), module.buffers()):
                tensor.data = self.rounded(tensor.data)
        return before
