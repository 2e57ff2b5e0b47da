"""Describe a layer: how its module is built, the tensors that it reads and writes, what it shares with others."""

from __future__ import annotations

import hashlib
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from vpipe import accelerator
from vpipe.arguments import Arguments, shown
from vpipe.description.cut import LOSS as LOSS
from vpipe.errors import Problem, UserError, nearest
from vpipe.model.sequential import put_module

_REPLICAS = "stages=Cut(2, ranks=2) has every stage on two ranks, and adds their gradients"


def seed_of(*parts: int) -> int:
    """Return a 63-bit seed made from integers: the same everywhere, unrelated for neighbouring values."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Layer:
    """The smallest unit a model may be cut between.

    ``build`` makes the module (one that exists is trained itself), whose ``forward`` takes ``inputs`` in that order and
    returns ``outputs`` in that order (a tensor, or a tuple of several). ``ties`` maps a parameter of this layer
    to the parameter of an earlier layer that it shares: ``{"decoder.weight": "embed.word.weight"}``.
    ``shared`` maps a submodule of this layer, ``""`` for all of it, to the module of an earlier layer that it is, such
    as ``"norm"`` or ``"block.norm"``: both have one set of buffers, and so must be in one stage.

    ``carried`` names tensors that go from a slice of a sequence to the next, where the schedule has slices: such as
    ``("keys", "values")``. ``forward`` is then given ``carried=``, a tuple of these tensors, empty for the first slice,
    and returns them behind its outputs. ``()``: every token is computed by itself. None: the layer cannot do so.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ("h",)
    outputs: tuple[str, ...] = ("h",)
    ties: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    carried: Sequence[str] | None = None

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
        if self.carried is not None:
            names = given.names(f"the carried tensors {where}", self.carried, "('keys', 'values')")
            object.__setattr__(self, "carried", names)
        for what, found in (("output", self.outputs), ("carried tensor", self.carried or ())):
            if len(set(found)) < len(found):
                given.refuse(f"the {what}s {where} are {shown(found)}, with a name that stands twice",
                             f"give every {what} a name of its own")
        for field_name, example in (("ties", "{'decoder.weight': 'embed.word.weight'}"),
                                    ("shared", "{'norm': 'block.norm'}")):
            value = getattr(self, field_name)
            if not isinstance(value, Mapping) or not all(isinstance(word, str) for pair in value.items()
                                                         for word in pair):
                given.refuse(f"the {field_name} {where} are {shown(value)}", f"give a dict, such as {example}")
        given.check()

    @property
    def carrying(self) -> str:
        """Return how ``forward`` must take and return what it carries, for messages."""
        return (f"Layer(carried={self.carried}) asks for a forward with carried=None: given a tuple of what the slice "
                "before carried, empty for the first one, it returns what it carries on behind its outputs; None, "
                "without slices, it returns its outputs alone")

    def materialize(self, index: int, seed: int) -> nn.Module:
        """Return the module, initialised under a seed made from the run's seed and the layer's index alone.

        So a layer starts from the same weights on whichever rank, and on a GPU too. The caller's random state stays.
        """
        with accelerator.seeded(seed_of(seed, index)):
            return self.make()

    def make(self) -> nn.Module:
        """Build the module. Raises UserError when it is no module, or one that no stage can hold."""
        try:
            with none_made(self.name):
                module = self.build()
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"raised by what builds layer '{self.name}'")
            raise
        if not isinstance(module, nn.Module):
            raise UserError(f"layer '{self.name}' was built as {shown(module)}, not as an nn.Module",
                            hint="its build function must return a module: Layer(name, lambda: MyModule())")
        check_module(self.name, module)
        return module

    def without_values(self) -> nn.Module | None:
        """Build the module on the meta device; None where its constructor reads values."""
        try:
            with torch.random.fork_rng(devices=[]), without_values():
                return self.make()
        except UserError:
            raise
        except Exception:  # a constructor that reads values fails in a way of its own
            return None

    def outline(self, index: int) -> nn.Module:
        """Build the module for the names and shapes of its tensors: without values, unless its constructor reads some.
        """
        found = self.without_values()
        return self.materialize(index, seed=0) if found is None else found


def check_module(name: str, module: nn.Module) -> None:
    """Raise UserError for a module that is wrapped or sharded, or has parameters or buffers without a shape, or that
    belong to TorchScript."""
    if (wrapper := find_wrapper(name, module, divided=True)) is not None:
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
def none_made(name: str) -> Iterator[None]:
    """Refuse wrappers as they are made, for the layer called ``name``: they begin by waiting for all ranks, of which
    some build other layers."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # what nobody has imported is not in use
    kinds = [DistributedDataParallel, *([] if fsdp is None else [fsdp.FullyShardedDataParallel])]
    before = [kind.__init__ for kind in kinds]

    def refuse(wrapper: nn.Module, *arguments: object, **options: object) -> NoReturn:
        problem = _wrapped(f"layer '{name}'", wrapper, divided=True)
        assert problem is not None, "it is one of these kinds"
        raise UserError.all_of([problem])

    try:
        for kind in kinds:
            setattr(kind, "__init__", refuse)  # noqa: B010 - of a class, which mypy would not let be assigned
        yield
    finally:
        for kind, made in zip(kinds, before, strict=True):
            setattr(kind, "__init__", made)  # noqa: B010


def find_wrapper(name: str, module: nn.Module, divided: bool) -> Problem | None:
    """Return why a layer, called ``name``, cannot be in a stage: it is sharded or wrapped.

    Args:
        divided: whether the schedule gathers the weights that ``fully_shard`` divides.
    """
    for path, part in module.named_modules():
        where = f"layer '{name}'" + (f" ('{path}' in it)" if path else "")
        if (problem := _wrapped(where, part, divided)) is not None:
            return problem
    return None


def _wrapped(where: str, part: nn.Module, divided: bool) -> Problem | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded: tuple[type, ...] = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    if isinstance(part, DistributedDataParallel):
        return Problem(f"{where} is wrapped in DistributedDataParallel, which adds gradients when no schedule says "
                       "so: its ranks may wait for one another for ever", f"give the module itself: {_REPLICAS}")
    if isinstance(part, sharded) and not (divided and isinstance(part, sharded[:1])):
        how = "fully_shard" if isinstance(part, sharded[:1]) else "FullyShardedDataParallel"
        return Problem(f"{where} is sharded by {how}, which gathers weights and adds gradients when no schedule "
                       f"says so: some would be lost", f"give the module without {how}: {_REPLICAS}; or the "
                       "pipeline one dimension of a mesh, and fully_shard another: Execution(mesh=mesh, data='dp')")
    return None


@contextmanager
def without_values() -> Iterator[None]:
    """Build modules with shapes and dtypes but no values: on the meta device, without memory."""
    # A constructor that loads weights loads none, of each of which torch would warn. To draw normal values for a tensor
    # without values, torch would import a compiler, for seconds.
    with warnings.catch_warnings(), torch.device("meta"), _Undrawn((Tensor.normal_, nn.init.normal_),
                                                                    lambda tensor: tensor.is_meta):
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
        yield


@contextmanager
def without_random_values() -> Iterator[None]:
    """Build modules whose parameters are not drawn, which saves time where all of them are loaded afterwards."""
    drawing = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
    with _Undrawn(drawing, lambda tensor: isinstance(tensor, nn.Parameter)):
        yield


class _Undrawn(TorchFunctionMode):
    """Leave some of the tensors as they are for which functions would draw values."""

    def __init__(self, drawing: Sequence[Callable[..., Any]], leaves: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._drawing, self._leaves = drawing, leaves

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._drawing:
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if self._leaves(tensor):
                return tensor
        return function(*args, **(kwargs or {}))


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
    """Return shape and dtype as text, of a DTensor its placements, too, and whether it is not trained."""
    placed = "".join(f", {place}" for place in getattr(parameter, "placements", ()))
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{list(parameter.shape)} ({str(parameter.dtype).removeprefix('torch.')}{placed}{frozen})"


def check_alike(tied: Mapping[str, str]) -> None:
    """Raise UserError for tied parameters, two names with their :func:`kind_of`, that are of different kinds."""
    (own, one), (target, other) = tied.items()
    if one != other:
        raise UserError(f"'{own}' {one} is tied to '{target}' {other}",
                        hint="tied parameters are one: give both the same shape and dtype, train both or none, or "
                             "leave out the tie")


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` where ``module`` keeps the one called ``name`` (dots lead into submodules)."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, parameter)


def moved(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a module, and return it; a parameter of several names stays one.

    Where another package than torch brings the device, ``Module.to`` makes a parameter of each name.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((part, name))
    module.to(device)
    for (first, own), *others in places.values():
        for part, name in others:
            setattr(part, name, getattr(first, own))
    for parameter in module.parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, kind):  # which autograd does not find any more after Module.to of a DTensor
                setattr(parameter, kind, getattr(parameter, kind))
    return module
