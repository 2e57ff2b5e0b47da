"""The layers of a stage: built on its device, called in its precision, each under a seed of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from vpipe.errors import UserError, VpipeError
from vpipe.model.layer import Layer, Model, seed_of, share_modules
from vpipe.model.sequential import rounded_module
from vpipe.model.split import StageSpec
from vpipe.runtime.collect import share_ties
from vpipe.runtime.halves import WeightHalf
from vpipe.runtime.intercept import Interception
from vpipe.runtime.layer_error import Computed, forward_error
from vpipe.runtime.precision import Precision
from vpipe.runtime.record import DropoutKey, Record, Span
from vpipe.runtime.rounding import Rounding


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
