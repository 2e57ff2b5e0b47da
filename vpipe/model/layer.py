"""A model is an ordered list of layers that pass named tensors on.

A :class:`Layer` holds a function that builds its module, and the names of the tensors that it reads and writes;
nothing is built until a rank needs it. Names work like variables in a program: a later layer may write a name again
(``h`` in, ``h`` out), and a name stays readable until then, so a tensor may skip any number of layers.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from vpipe import accelerator
from vpipe.arguments import Arguments, shown
from vpipe.errors import Problem, UserError, nearest
from vpipe.model.sequential import (
    Loss,
    WithLoss,
    check_children,
    check_sequential,
    copy_module,
    put_module,
    shared_modules,
    shared_parameters,
)
from vpipe.model.wrappers import find_wrapper

LOSS = "loss"

NO_LABEL = -100
"""Label of a token after which there is none to learn."""


def seed_of(*parts: int) -> int:
    """Return a 63-bit seed made from integers: the same everywhere, unrelated for neighbouring values."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Layer:
    """The smallest unit a model may be cut between.

    ``build`` makes the module, whose ``forward`` takes ``inputs`` in that order and returns ``outputs``
    in that order (a tensor, or a tuple when there are several). ``ties`` maps a parameter of this layer
    to the parameter of an earlier layer that it shares: ``{"decoder.weight": "embed.word.weight"}``.
    ``shared`` maps a submodule of this layer, ``""`` for all of it, to the module of an earlier layer that it is, such
    as ``"norm"`` or ``"block.norm"``: both have one set of buffers, and so must be in one stage.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ("h",)
    outputs: tuple[str, ...] = ("h",)
    ties: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = Arguments()
        given.name("the name of a layer", self.name, "block0")
        where = f"of layer {shown(self.name)}"
        if isinstance(self.build, nn.Module):
            given.refuse(f"layer {shown(self.name)} is given {shown(self.build)}, a module, not a function that builds "
                         "it", f"write Layer({shown(self.name)}, lambda: {type(self.build).__name__}(...)): a rank "
                         "builds only its own layers, each under a seed of its own")
        else:
            given.function(f"the build function {where}", self.build, 0,
                           f"give a function without arguments: Layer({shown(self.name)}, lambda: MyModule(...))")
        for field_name in ("inputs", "outputs"):
            names = given.names(f"the {field_name} {where}", getattr(self, field_name), "('h', 'mask')")
            object.__setattr__(self, field_name, names)
        if len(set(self.outputs)) < len(self.outputs):
            given.refuse(f"the outputs {where} are {shown(self.outputs)}, with a name that stands twice",
                         "give every output a name of its own")
        for field_name, example in (("ties", "{'decoder.weight': 'embed.word.weight'}"),
                                    ("shared", "{'norm': 'block.norm'}")):
            value = getattr(self, field_name)
            if not isinstance(value, Mapping) or not all(isinstance(word, str) for pair in value.items()
                                                         for word in pair):
                given.refuse(f"the {field_name} {where} are {shown(value)}", f"give a dict, such as {example}")
        given.check()

    def materialize(self, index: int, seed: int) -> nn.Module:
        """Return the module, initialised under a seed made from the run's seed and the layer's index alone.

        So a layer starts from the same weights on whichever rank, and on a GPU too. The caller's random state stays.
        """
        with accelerator.seeded(seed_of(seed, index)):
            return self.make()

    def make(self) -> nn.Module:
        """Build the module. Raises UserError when it is no module, or one that no stage can hold."""
        try:
            module = self.build()
        except Exception as error:
            error.add_note(f"raised by what builds layer '{self.name}'")
            raise
        if not isinstance(module, nn.Module):
            raise UserError(f"layer '{self.name}' was built as {shown(module)}, not as an nn.Module",
                            hint="its build function must return a module: Layer(name, lambda: MyModule())")
        check_module(self.name, module)
        return module


def check_module(name: str, module: nn.Module) -> None:
    """Raise UserError for a module that is wrapped or sharded, or has parameters or buffers without a shape, or that
    belong to TorchScript."""
    if (wrapper := find_wrapper(name, module)) is not None:
        raise UserError.all_of([wrapper])
    for own, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise UserError(f"'{name}.{own}' has no shape yet: its module is lazy",
                            hint="give the sizes (nn.Linear instead of nn.LazyLinear), or run the module once on a "
                                 "sample where it is made")
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule) and next(
                chain(part.parameters(), part.buffers()), None) is not None:
            raise UserError(f"layer '{name}' holds a ScriptModule with parameters or buffers, whose weights cannot be "
                            "exchanged", hint="give the module itself, without torch.jit")


@contextmanager
def without_values() -> Iterator[None]:
    """Build modules with shapes and dtypes but no values: on the meta device, without memory."""
    with torch.device("meta"), _UnfilledNormal():
        yield


def build_outline(layer: Layer, number: int) -> nn.Module:
    """Build a layer for the names and shapes of its tensors: without values, unless its constructor reads some."""
    try:
        with torch.random.fork_rng(devices=[]), without_values():
            return layer.make()
    except Exception:  # a constructor that reads values fails in a way of its own
        return layer.materialize(number, seed=0)


class _UnfilledNormal(TorchFunctionMode):
    """Leave a tensor without values as it is: torch would import a compiler to draw normal ones for it, for seconds."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **(kwargs or {}))


@contextmanager
def without_random_values() -> Iterator[None]:
    """Build modules whose parameters are not drawn, which saves time where all of them are loaded afterwards."""
    with _UndrawnParameters():
        yield


class _UndrawnParameters(TorchFunctionMode):
    """Leave parameters that would be drawn as they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if isinstance(tensor, nn.Parameter):
                return tensor
        return function(*args, **(kwargs or {}))


class Model:
    """Layers in order, and the names of the fields of a batch (a dict of tensors, dimension 0 = samples).

    The last layer must write the tensor called ``loss``: the mean loss of the samples it was given, a scalar.

    Args:
        labels: a field that the last layer reads, if the loss is the mean over its entries that are not
            :data:`NO_LABEL`, of which samples have different numbers. An evaluation is then the mean over all of them.
            In training an update weights its microbatches alike, as ever.
    """

    def __init__(self, layers: Iterable[Layer], batch: Sequence[str], labels: str | None = None) -> None:
        self.layers, self.batch = _checked(layers, batch)
        self.labels = labels
        problems = list(_problems(self.layers, self.batch))
        if labels is not None and (labels not in self.batch or labels not in self.layers[-1].inputs):
            problems.append(Problem(f"the labels of the model are {shown(labels)}, which is no field of the batch that "
                                    "the last layer reads", nearest(str(labels), list(self.batch))))
        if problems:
            raise UserError.all_of(problems)

    def __len__(self) -> int:
        return len(self.layers)

    @classmethod
    def sequential(cls, modules: nn.Sequential, loss: Loss) -> Model:
        """Return an ``nn.Sequential`` as a model of one layer per child; a batch is ``input`` and ``target``.

        The children are already initialised and are copied as they are; ``loss(output, target)`` joins the last child.
        A parameter that several children share, or a child that stands in several places, becomes tied. A module with
        buffers that stands in several places (a batch normalisation) must have them all in one stage. Raises UserError
        when they are something else; there is no child; one is lazy or scripted; a function in it, or the loss, holds a
        module or a tensor of the ``nn.Sequential``; the loss has parameters to train.
        """
        check_sequential(modules, loss)
        children = {name: child for name, child in modules._modules.items() if child is not None}  # repeated ones too
        if not children:
            raise UserError("the nn.Sequential has no children", hint="give it at least one module")
        for name, child in children.items():
            check_module(name, child)
        check_children(modules, children, loss)
        *front, last = children
        ties, shared = shared_parameters(children), shared_modules(children)
        source = "input"
        layers = []
        for name in front:
            layers.append(Layer(name, partial(copy_module, children[name]), (source,), ("h",), ties[name],
                                shared[name]))
            source = "h"
        ending = WithLoss(children[last], loss)
        layers.append(Layer(last, partial(copy_module, ending), (source, "target"), (LOSS,), ties[last], shared[last]))
        return cls(layers, batch=("input", "target"))

    def materialize(self, seed: int = 0) -> nn.ModuleDict:
        """Return the whole model on one device, tied parameters shared: for references, export, inference."""
        given = Arguments()
        seed = given.integer("seed", seed, least=0)
        given.check()
        modules = {layer.name: layer.materialize(i, seed) for i, layer in enumerate(self.layers)}
        share_modules(modules, {layer.name: layer.shared for layer in self.layers})
        for layer in self.layers:
            for own, target in layer.ties.items():
                owner, parameter = split_target(target, self.layers)
                before = parameter_of(layer.name, modules[layer.name], own)
                shared = parameter_of(owner, modules[owner], parameter)
                check_alike({f"{layer.name}.{own}": kind_of(before), target: kind_of(shared)})
                set_parameter(modules[layer.name], own, shared)
        whole = nn.ModuleDict()
        whole._modules.update(modules)  # layer names may hold dots, which add_module refuses
        return whole

    def index(self, name: str) -> int:
        """Return the position of the layer called ``name``. Raises UserError when there is none."""
        names = [layer.name for layer in self.layers]
        if name not in names:
            raise UserError(f"no layer is called {shown(name)}", hint=nearest(str(name), names))
        return names.index(name)


def split_target(target: str, layers: Sequence[Layer]) -> tuple[str, str]:
    """Split ``"<layer name>.<parameter>"`` into its two parts; layer names may hold dots themselves."""
    for layer in layers:
        if target.startswith(layer.name + "."):
            return layer.name, target[len(layer.name) + 1:]
    raise UserError(f"tie to '{target}', which names no layer",
                    hint=nearest(target.rsplit(".", 1)[0], [layer.name for layer in layers]))


def share_modules(modules: dict[str, nn.Module], shared: Mapping[str, Mapping[str, str]]) -> None:
    """Make shared submodules one object in ``modules``, the layers here by name; ``shared``: see :class:`Layer`."""
    for name, same in shared.items():
        for path, target in same.items():
            owner = next((other for other in modules if f"{target}.".startswith(f"{other}.")), None)
            if owner is not None:
                modules[name] = put_module(modules[name], path, modules[owner].get_submodule(target[len(owner) + 1:]))


def parameter_of(layer: str, module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter of a layer that a tie names. Raises UserError when there is none."""
    known = dict(module.named_parameters(remove_duplicate=False))
    if name not in known:
        raise UserError(f"a tie names '{layer}.{name}', but layer '{layer}' has no parameter '{name}'",
                        hint=nearest(name, list(known)) if known else "it has no parameters at all")
    return known[name]


def kind_of(parameter: Tensor) -> str:
    """Return shape and dtype as text."""
    return f"{list(parameter.shape)} ({str(parameter.dtype).removeprefix('torch.')})"


def check_alike(tied: Mapping[str, str]) -> None:
    """Raise UserError for tied parameters, two names with their :func:`kind_of`, of different shapes or dtypes."""
    (own, one), (target, other) = tied.items()
    if one != other:
        raise UserError(f"'{own}' {one} is tied to '{target}' {other}",
                        hint="tied parameters are one: give both the same shape and dtype, or leave out the tie")


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` where ``module`` keeps the one called ``name`` (dots lead into submodules)."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, parameter)


def _checked(layers: Any, batch: Any) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return both arguments of a model, each as a tuple. Raises UserError when they are something else."""
    given = Arguments()
    hint = "give a list of layers: Model([Layer('embed', lambda: Embed(), ...), ...], batch=('ids', 'labels'))"
    if isinstance(layers, nn.Sequential):
        given.refuse("the layers of the model are an nn.Sequential", "write Model.sequential(modules, loss)")
    elif isinstance(layers, (nn.Module, Tensor, str)) or not isinstance(layers, Iterable):
        given.refuse(f"the layers of the model are {shown(layers)}", hint)
    else:
        layers = tuple(layers)
        for i, layer in enumerate(layers):
            if not isinstance(layer, Layer):
                given.refuse(f"layer {i} of the model is {shown(layer)}, not a Layer", hint)
    names = given.names("the batch fields of the model", batch, "('ids', 'labels')")
    given.check()
    return layers, names


def _problems(layers: tuple[Layer, ...], batch: tuple[str, ...]) -> Iterable[Problem]:
    if not layers:
        yield Problem("the model has no layers", "give Model at least one Layer")
        return
    names = [layer.name for layer in layers]
    for name in sorted(n for n, times in Counter(names).items() if times > 1):
        yield Problem(f"two layers are called '{name}'", "give every layer a name of its own")
    taken = set(names)
    for name in names:
        for other in (name[:place] for place, sign in enumerate(name) if sign == "."):
            if other in taken:
                yield Problem(f"the name of layer '{name}' begins with that of layer '{other}' and a dot",
                              "rename one of them: '<layer>.<parameter>' must name one parameter alone")
    known = set(batch)
    if LOSS in known:
        yield Problem("a batch field is called 'loss'", "rename the field: 'loss' is the tensor that is minimised")
    for i, layer in enumerate(layers):
        for name in layer.inputs:
            if name not in known:
                yield Problem(f"layer '{layer.name}' reads '{name}', which no earlier layer writes and no batch holds",
                              nearest(name, sorted(known)))
        for name in layer.outputs:
            if name in batch:
                yield Problem(f"layer '{layer.name}' writes '{name}', which is a field of the batch",
                              "give the output another name")
            if name == LOSS and i != len(layers) - 1:
                yield Problem(f"layer '{layer.name}' writes 'loss' but is not the last layer",
                              "let the last layer write the loss: a pipeline starts its backward there")
        known.update(layer.outputs)
        for own, target in layer.shared.items():
            if not any(f"{target}.".startswith(earlier + ".") for earlier in names[:i]):
                yield Problem(f"layer '{layer.name}' shares '{own}' with '{target}', which is in no earlier layer",
                              "what is shared is '<earlier layer>' or '<earlier layer>.<submodule>'")
        for own, target in layer.ties.items():
            if not any(target.startswith(earlier + ".") for earlier in names[:i]):
                yield Problem(f"layer '{layer.name}' ties '{own}' to '{target}', which is in no earlier layer",
                              "a tie points to '<earlier layer>.<parameter>'")
    if LOSS not in layers[-1].outputs:
        yield Problem(f"the last layer '{layers[-1].name}' does not write 'loss'",
                      f"it writes {list(layers[-1].outputs)}: name one of its outputs 'loss'")
    fields = {name for layer in layers for name in layer.inputs}
    for name in batch:
        if name not in fields:
            yield Problem(f"no layer reads the batch field '{name}'", "leave it out of batch=...")
