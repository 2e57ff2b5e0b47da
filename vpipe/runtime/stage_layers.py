"""Build the layers of a stage on its device, collect their parameters, return and load their state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vpipe import accelerator
from vpipe.description.cut import StageSpec
from vpipe.description.precision import Precision
from vpipe.errors import UserError
from vpipe.model.layer import (
    LOSS,
    check_alike,
    find_wrapper,
    kind_of,
    moved,
    parameter_of,
    set_parameter,
    share_modules,
)
from vpipe.model.model import Model
from vpipe.model.sequential import loss_buffers, rounded_module
from vpipe.runtime.sharded_tensors import local, parted, set_data
from vpipe.runtime.weight_versions import HOOKS, Slot, WeightVersions, has_hooks, replace_parameter

NARROW = (torch.bfloat16, torch.float16)
"""The dtypes in which small steps of an optimizer are lost."""

SAMPLED_VALUES = 1024
"""Values of a parameter, at least, by which a change of it is seen."""

KEPT_VALUES = 1 << 18
"""Values of a stage, at most, of which the places in memory are kept, and with them the memory."""

Marks = tuple[Sequence[object], ...]
"""Names, and marks of each kind in their order."""

_Samples = tuple[list[str], list[Any], bool]
"""Names, arrays in the memory of these parameters, and whether those show every change of a value."""

UncalledHooks = tuple[WeightVersions, Collection[str], Sequence[str], str, str]
"""Weights, names of them, kinds of hooks, why these are not called, and what to do instead."""

_NONE = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class Rounding:
    """Round tensors to a reduced precision and back. Other dtypes, such as float64 and integers, stay as they are."""

    dtype: torch.dtype

    def round_output(self, name: str, tensor: Tensor) -> Tensor:
        """Return a layer's output as the next layer is given it: rounded; the loss in fp32."""
        if name == LOSS:
            return tensor.float() if tensor.dtype is self.dtype else tensor
        return self.rounded(tensor)

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the reduced precision, if it is fp32."""
        return tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor

    def convert(self, modules: Iterable[nn.Module], pure: bool) -> dict[int, Tensor]:
        """Give parameters the dtype in which layers compute; buffers stay as their layers made them.

        If ``pure``, parameters are rounded, and trained ones have fp32 masters; else trained ones are fp32. What has
        running statistics (BatchNorm) is fp32 with these: in 16 bits they would stop following small changes. Returns
        the masters by the ids of their parameters.
        """
        masters: dict[int, Tensor] = {}
        for part in (part for module in modules for part in module.modules()):
            running = getattr(part, "running_mean", None) is not None
            for tensor in (*part.parameters(recurse=False), *(part.buffers(recurse=False) if running else ())):
                if id(tensor) in masters or tensor.dtype not in (torch.float32, *NARROW):
                    continue
                if tensor.requires_grad and pure and not running:
                    masters[id(tensor)] = tensor.data.float()
                if pure or running or tensor.requires_grad:
                    set_data(tensor, tensor.data.to(self.dtype if pure and not running else torch.float32))
        return masters


class StageLayers:
    """The layers of one stage on one device, with their parameters and buffers.

    Attributes:
        modules, layer_names: by the layer's number in the model.
        weights: versions of the stage's own parameters.
        borrowed: versions of parameters tied to those of other stages, by owner.
        all_weights: both.
        frozen_ties: parameters tied to those of other stages that are not trained, by their names there.
        generators: of random numbers, that the layers draw from.
        rounding: of the layers' outputs; None in fp32.
        dtypes: of the parameters as the layers were built, by name.
        divided: whether the schedule gathers the weights that ``fully_shard`` has divided.
        uncalled_hooks: parameters whose hooks are refused.

    Args:
        model: the whole model; only this stage's layers are built.
        spec: its layers, inputs and outputs.
        seed: the run's seed.
        device: where to compute.
        precision: in which numbers they compute.
    """

    def __init__(self, model: Model, spec: StageSpec, *, seed: int, device: torch.device,
                 precision: Precision) -> None:
        self.spec, self.seed, self.device, self.precision, self.divided = spec, seed, device, precision, False
        self.uncalled_hooks: Sequence[UncalledHooks] = ()
        self.rounding = None if precision.dtype is None else Rounding(precision.dtype)
        self.layer_names = {i: model.layers[i].name for i in spec.layers}
        named = {self.layer_names[i]: moved(model.layers[i].materialize(i, seed), device) for i in spec.layers}
        self.generators = accelerator.generators_of(device)
        share_modules(named, {self.layer_names[i]: model.layers[i].shared for i in spec.layers})
        self.modules = {i: named[name] for i, name in self.layer_names.items()}
        self._ties = {i: model.layers[i].ties for i in spec.layers}
        self.frozen_ties = self._share_ties()
        self._weight_rounding = self.rounding if precision.pure else None  # other precisions round in autocast
        self.dtypes = {name: parameter.dtype for name, parameter in self.named_parameters()}
        masters = {} if self.rounding is None else self.rounding.convert(
            map(rounded_module, self.modules.values()), precision.pure)
        self.weights, self.borrowed = self._collect_weights(masters if precision.pure else None)
        self.all_weights = (self.weights, *self.borrowed.values())
        self._parts: list[tuple[nn.Module, type[nn.Module], dict[str, nn.Module | None], int]] = []
        self._places: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self._marked: list[str] = []  # names of the parameters there, and of masters
        self._samples: dict[tuple[int, ...], _Samples] = {}  # of few values, by the memory of all these
        self._frozen = [(f"{self.layer_names[i]}.{name}", parameter) for i, module in self.modules.items()
                        for name, parameter in module.named_parameters() if not parameter.requires_grad]

    def _share_ties(self) -> dict[str, nn.Parameter]:
        """Make tied parameters one object where both layers are in the stage, or both are tied to the same one of
        another stage that is not trained. Return the latter by their names there.

        Raises:
            UserError: one does not exist, or they are of different kinds; a parameter has hooks, and the one that takes
                its place has none.
        """
        at = {name: i for i, name in self.layer_names.items()}
        frozen: dict[str, nn.Parameter] = {}
        for i, tied in self._ties.items():
            for own, target in tied.items():
                full = f"{self.layer_names[i]}.{own}"
                before = parameter_of(self.layer_names[i], self.modules[i], own)
                owner = next((name for name in at if target.startswith(name + ".")), None)
                if owner is not None:
                    shared = parameter_of(owner, self.modules[at[owner]], target[len(owner) + 1:])
                elif before.requires_grad or full not in self.spec.borrowed:
                    continue
                else:
                    shared = frozen.setdefault(self.spec.borrowed[full][1], before)
                check_alike({full: kind_of(before), target: kind_of(shared)})
                set_parameter(self.modules[i], own, shared)
                if before is not shared:
                    if has_hooks(before) and not has_hooks(shared):
                        raise UserError(f"'{full}' has hooks, but '{target}' takes its place: they are tied",
                                        hint=f"register the hooks on '{target}'")
                    replace_parameter(before, full)
        return frozen

    def _collect_weights(self, unrounded: Mapping[int, Tensor] | None) -> tuple[
            WeightVersions, dict[int, WeightVersions]]:
        """Return the trainable parameters of the stage: its own, and those borrowed from other stages, by owner.

        Args:
            unrounded: values that parameters had before they were rounded, by their ids.
        """
        borrowed = self.spec.borrowed
        first: dict[int, str] = {}
        parameters: dict[str, nn.Parameter] = {}
        slots: dict[str, list[Slot]] = defaultdict(list)
        for i, module in self.modules.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                full = f"{self.layer_names[i]}.{name}"
                if not parameter.requires_grad:
                    continue
                path, _, leaf = name.rpartition(".")
                canonical = first.setdefault(id(parameter), full)
                parameters.setdefault(canonical, parameter)
                slots[canonical].append((module.get_submodule(path), leaf))
        borrowed_here: dict[int, dict[str, nn.Parameter]] = defaultdict(dict)
        slots_of_borrowed: dict[int, dict[str, list[Slot]]] = defaultdict(lambda: defaultdict(list))
        for own, (owner, target) in borrowed.items():
            if own in parameters:  # otherwise under the name of another layer that shares it
                # Several parameters here may be tied to the same one there: they are one value.
                borrowed_here[owner].setdefault(target, parameters.pop(own))
                slots_of_borrowed[owner][target] += slots.pop(own)
        masters = None if unrounded is None else {
            name: unrounded[id(p)] if id(p) in unrounded else p.data.clone() for name, p in parameters.items()}
        return (WeightVersions(parameters, slots, masters),
                {owner: WeightVersions(borrowed_here[owner], slots_of_borrowed[owner])
                 for owner in sorted(borrowed_here)})

    @property
    def trains(self) -> bool:
        """Return whether a parameter of the stage, or one that it borrows, is trained."""
        return bool(self.weights.names or self.borrowed)

    def check_frozen(self) -> None:
        """Refuse a parameter that wants a gradient, but did not when the stage was built; where weights have several
        versions, also the reverse."""
        changed = [(name, "a", "did not", "no optimizer steps it") for name, p in self._frozen if p.requires_grad]
        changed += [(name, "no", "did", "other versions of it do") for weights in self.all_weights if weights.parted
                    for name, p in zip(weights.names, weights.leaves(), strict=True) if not p.requires_grad]
        for name, now, then, why in changed:
            raise UserError(f"'{name}' requires {now} gradient now, but {then} when the pipeline was built: {why}",
                            hint="save, and load into a pipeline that is built with what is trained from here on")

    def check_not_wrapped(self, when: str = "; it was not when the pipeline was built") -> None:
        """Refuse a layer that is wrapped, or sharded where the schedule does not gather weights."""
        # This is asked in every update: modules are only walked again if one was exchanged.
        for part, kind, children, count in self._parts:
            if type(part) is not kind or part._modules != children or len(part._parameters) != count:
                break
        else:
            if self._parts:
                return
        for i, module in self.modules.items():
            if (wrapper := find_wrapper(self.layer_names[i], module, self.divided)) is not None:
                raise UserError(f"{wrapper.what}{when}", hint=wrapper.hint)
        parts = {f"{self.layer_names[i]}.{path}".removesuffix("."): part for i, module in self.modules.items()
                 for path, part in module.named_modules(remove_duplicate=False)}
        self._parts = [(part, type(part), dict(part._modules), len(part._parameters)) for part in parts.values()]
        self._places = [(part._parameters, own) for part in parts.values() for own in part._parameters]
        self._marked = [f"{path}.{own}" for path, part in parts.items() for own in part._parameters]
        self._marked += self.weights.names

    def check_hooks(self) -> None:
        """Refuse hooks on parameters, also those of an optimizer's factory, where torch would not call them."""
        self.weights.adopt_hooks()
        for weights, names, kinds, why, remedy in self.uncalled_hooks:
            if names and (found := [name for name in weights.hooked(kinds) if name in names]):
                which = " and ".join(map(repr, found[:2])) + ", ..." * (len(found) > 2)
                registered = "register_hook, " * (kinds is HOOKS) + "register_post_accumulate_grad_hook"
                raise UserError(f"hooks on {which} ({registered}) are not called here: {why}",
                                hint=f"{remedy}, or change gradients in the optimizer's step")

    def marks(self, sampled: bool = True) -> list[Marks]:
        """Return marks by which a change of weights or gradients by a script is seen. One of ``p.data`` in place is
        seen by some values of each, if they are ``sampled`` and on no device for which the host would wait."""
        # This is asked twice in every update: it lists property by property, which is faster than tensor by tensor.
        tensors = [_NONE if (p := held.get(own)) is None else p for held, own in self._places]
        tensors += self.weights.masters.values()
        parts = tensors if {nn.Parameter}.issuperset(map(type, tensors)) else list(map(local, tensors))
        memory = tuple(map(Tensor.data_ptr, parts))
        names, samples, whole = self._samples.get(memory) or self._sample(memory, parts)
        return [(self._marked, list(map(id, tensors)), memory, list(map(Tensor.numel, parts)),
                 list(map(Tensor.stride, parts)), [p.grad is None or p.grad._version for p in tensors],
                 memory if sampled and whole else [p._version for p in tensors]),
                (names, [sample.tobytes() for sample in samples] if sampled else names)]

    def _sample(self, memory: tuple[int, ...], parts: Sequence[Tensor]) -> _Samples:
        # Each memory once: masters and leaves mostly share it.
        once = {(at, part.numel()): (name, part) for at, name, part in zip(memory, self._marked, parts, strict=True)
                if self.device.type == "cpu" and part.numel()}
        whole = bool(once) and all(part.numel() <= SAMPLED_VALUES and part.is_contiguous() for part in parts)
        found = [name for name, _ in once.values()], [_some_values(part) for _, part in once.values()], whole
        if sum(size for _, size in once) <= KEPT_VALUES:
            if len(self._samples) > 8:  # of versions that are not in use any more
                self._samples.clear()
            self._samples[memory] = found
        return found

    def use_latest(self) -> None:
        """Point the modules to the latest weights."""
        for weights in self.all_weights:
            weights.use(weights.latest)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set every module to evaluation mode, and back to the mode it was in: a layer's ``train`` may do more."""
        modes = {module: module.training for layer in self.modules.values() for module in layer.modules()}
        for layer in self.modules.values():
            layer.eval()
        try:
            yield
        finally:
            for layer in self.modules.values():
                layer.train(modes[layer])
            for module, mode in modes.items():
                module.training = mode

    # -- state -----------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters as ``"<layer>.<parameter>"``; a shared one under each of its names."""
        for i, module in self.modules.items():
            yield from module.named_parameters(self.layer_names[i], remove_duplicate=False)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all buffers as ``"<layer>.<buffer>"``."""
        for i, module in self.modules.items():
            yield from module.named_buffers(self.layer_names[i])

    @property
    def saves_buffers(self) -> bool:
        """Return whether a layer or its loss has buffers that are saved, which its forward may write."""
        modules = self.modules.values()
        return any(not module.state_dict().keys().isdisjoint(dict(module.named_buffers())) or loss_buffers(module)
                   for module in modules)

    def state(self) -> dict[str, Tensor]:
        """Return parameters (latest version; masters of rounded ones, frozen ones in their first dtype) and buffers.

        A tied parameter is returned only where it is owned.

        Raises:
            UserError: a layer has an extra state that is no tensor.
        """
        self.use_latest()
        state = {f"{self.layer_names[i]}.{name}": value for i, module in self.modules.items()
                 for name, value in module.state_dict(keep_vars=True).items() if name not in self._ties[i]}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise UserError(f"'{name}' in the state of its layer is {type(value).__name__}, not a tensor",
                                hint="let the layer keep a buffer instead of an extra state")
        if self.rounding is not None:
            masters = {id(leaf): master for leaf, (name, master) in
                       zip(self.weights.leaves(), self.weights.masters.items(), strict=True) if self.weights.owns(name)}
            state = {name: masters[id(value)] if id(value) in masters else value.to(
                torch.promote_types(value.dtype, torch.float32) if value.requires_grad else
                self.dtypes.get(name, value.dtype)) for name, value in state.items()}
        return {name: value.detach() for name, value in state.items()}

    def own_state(self, replica: int) -> dict[str, Tensor]:
        """Return of :meth:`state` what this replica answers for: what it steps, and the first one all else."""
        state, trained = self.state(), self.trained_names()
        return {name: value for name, value in state.items() if (
            replica == 0 if self.weights.owned is None or name not in trained else self.weights.owns(trained[name]))}

    def trained_names(self) -> dict[str, str]:
        """Return by the names in :meth:`state` those of the stage's own weights: shared ones have several there."""
        self.use_latest()
        names = dict(zip(map(id, self.weights.leaves()), self.weights.names, strict=True))
        return {name: names[id(p)] for name, p in self.named_parameters() if id(p) in names}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy in what :meth:`state` returned, perhaps of other stages; to be called while nothing is in flight."""
        own = self.state()
        for i, module in self.modules.items():
            prefix = f"{self.layer_names[i]}."
            module.load_state_dict({name.removeprefix(prefix): parted(value, own[name]) for name, value in state.items()
                                    if name in own and name.startswith(prefix)}, strict=False)  # ties are their owner's
        if self._weight_rounding is not None:
            for name, value in self.state().items():
                value.copy_(parted(state[name], value))


def check_not_shared(stages: Iterable[StageLayers]) -> None:
    """Refuse a trained parameter that two stages of this process share, before parameters are replaced."""
    seen: dict[int, str] = {}
    for stage in stages:
        mine = {id(parameter): f"{stage.layer_names[i]}.{name}" for i, module in stage.modules.items()
                for name, parameter in module.named_parameters() if parameter.requires_grad}
        for shared in mine.keys() & seen:
            raise UserError(f"'{mine[shared]}' and '{seen[shared]}' are one parameter, but on different stages or "
                            "ranks, where each is trained by itself",
                            hint="let every build function make a module of its own, and tie them: "
                                 "Layer(..., ties={...})")
        seen |= mine


def _some_values(part: Tensor) -> Any:
    """Return an array of some values of a tensor, in its memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    step = span // SAMPLED_VALUES | 1
    return part.detach().as_strided((-(-span // step), 1), (step, 1)).view(torch.uint8).numpy()
