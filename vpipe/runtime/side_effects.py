"""Undo and repeat the side effects of layers' forwards: inputs changed in place, buffers, random numbers.

A layer that changes its input in place (``nn.ReLU(inplace=True)``) is given an alias of it, so that autograd refuses a
backward that needs the input as it was; a recomputed layer is given a copy. A recomputed layer finds buffers as its
first forward found them, and leaves them as it found them: statistics advance once, and a layer that reads what it
changes computes the same again. Every forward gets its own copy of a buffer that the layers change in place, because
several microbatches are in flight, and their graphs may save it. The states of Python's, NumPy's and the modules' own
generators are saved and restored; torch's default ones are seeded again before each layer.

The first forwards show what changes: before them every buffer is copied. Later ones copy only what changes. Everything
else that a layer changes in its forward, such as a plain attribute, is the layer's own business.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.weight_versions import WeightVersions, sample

WATCHED = 3
"""Number of first forwards that show what a layer changes: a layer may begin its statistics in the second one."""


class _Buffers(NamedTuple):
    """The buffers of a module: its own table; what it held before a forward, of which some are copies; what the forward
    was given in their place; and the versions of the tensors before."""

    path: str
    table: dict[str, Tensor | None]
    before: dict[str, Tensor | None]
    given: dict[str, Tensor | None]
    versions: Sequence[int]


class _RandomSource(NamedTuple):
    """A source of random numbers: get its state, and put it back."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


class _Mark(NamedTuple):
    """Show a change of a parameter or of its gradient, when two marks are compared."""

    version: tuple[int, int, bytes]
    memory: int
    gradient: Tensor | None
    gradient_version: int


class StateBefore(NamedTuple):
    """The state before a forward that the forward may change: buffers of modules, states of random sources; marks of
    parameters, which a first forward must not change."""

    buffers: Sequence[_Buffers] = ()
    random: Sequence[tuple[_RandomSource, Any]] = ()
    marks: Sequence[Sequence[_Mark]] = ()


NOTHING = StateBefore()
"""The state before a forward that changes nothing."""


class SideEffects:
    """Track the side effects of the forward of consecutive layers of a stage.

    Args:
        layers: their modules, by name.
        recomputed: whether they are recomputed.
        weights: of the stage, and those that it borrows.

    Attributes:
        inputs: names of the inputs that the layers change in place.
        sources: of random numbers other than torch's own.
        drawn: those of them that forwards draw from.
        changes_buffers: whether a forward may change a buffer.
        walks_its_graph: whether a layer takes gradients of its own within its forward.
        inert: whether nothing is to be done from now on: the layers are not recomputed, and their first forwards have
            changed nothing.
    """

    def __init__(self, layers: Mapping[str, nn.Module], recomputed: bool, weights: Iterable[WeightVersions]) -> None:
        self._recomputed, self._weights = recomputed, list(weights)
        self._left = WATCHED  # first forwards that are still to come
        self.inputs: set[str] = set()
        modules = {module: path for layer, whole in layers.items()
                   for path, module in whole.named_modules(prefix=layer)}
        statistics = set(filter(_keeps_statistics, modules))
        self._tables = [(path, module._buffers) for module, path in modules.items()
                        if recomputed or module not in statistics]
        self._copied: set[tuple[str, str]] = set()  # buffers that forwards change in place: each gets its own copy
        self._changed = bool(statistics)  # whether forwards change buffers
        self.changes_buffers = True
        self.sources = list(_random_sources(modules))
        self.drawn: list[_RandomSource] = []
        self.walks_its_graph = self.inert = False

    # -- inputs

    def prepare_inputs(self, inputs: Mapping[str, Tensor], again: bool) -> dict[str, Tensor]:
        """Return the inputs to call the layers with; ``again``: a forward has shown which of them it changes."""
        separate = _copy if self._recomputed else alias
        return {name: separate(t) if name in self.inputs or (self._left and not again) else t
                for name, t in inputs.items()}

    def note_changed_inputs(self, inputs: Mapping[str, Tensor], given: Mapping[str, Tensor],
                            changed: Iterable[str]) -> None:
        """Note which inputs a forward has changed in place; ``given``: what :meth:`prepare_inputs` returned for them.

        Args:
            changed: inputs with another version than before.
        """
        self.inputs.update(changed)
        if self._left and self._recomputed:  # .data changes an input without a new version
            self.inputs.update(name for name, tensor in inputs.items()
                               if tensor is not given[name] and not _equal(tensor, given[name]))

    # -- buffers, random numbers, parameters

    def begin_forward(self) -> StateBefore:
        """Give the modules copies of the buffers that forwards change in place; return the state before."""
        buffers = []
        copies: dict[int, Tensor] = {}  # by identity: a buffer in two places gets one copy
        for path, table in self._tables:
            before, given = dict(table), dict(table)
            for name, tensor in table.items() if self._left or self._copied else ():
                copied = (path, name) in self._copied
                if (copied or self._left) and _is_copyable(tensor):
                    (given if copied else before)[name] = copied_once(tensor, copies)
            table.update(given)
            buffers.append(_Buffers(path, table, before, given, [_version(tensor) for tensor in before.values()]))
        sources, weights = (self.sources, self._weights) if self._left else (self.drawn, [])
        return StateBefore(buffers, [(source, source.get()) for source in sources], [_marks(each) for each in weights])

    def record_changes(self, state: StateBefore) -> StateBefore:
        """Return the part of :meth:`begin_forward` that the forward has changed; note which buffers later ones copy.

        Raises:
            UserError: a buffer was changed in place of which there is no copy; or a first forward changed a parameter,
                which could not be undone for a recompute, or which no optimizer would train.
        """
        for path, _, before, given, versions in state.buffers:
            for (name, tensor), version in zip(before.items(), versions, strict=True):
                now = given[name]
                if tensor is not now and (path, name) not in self._copied:  # a copy of the first forwards
                    if _equal(now, tensor):
                        before[name] = now
                    else:
                        self._copied.add((path, name))
                if _version(tensor) != version and (self._recomputed or (path, name) in self._copied):
                    raise UserError(
                        f"'{path}.{name}' was changed by a forward, but no copy of it: none of the first {WATCHED} "
                        "forwards did so, or the layer keeps a reference beside the module's own",
                        hint="read the buffer from its module in every forward, as in self.mean; a layer that changes "
                             "a buffer late cannot be recomputed")
        buffers = [each for each in state.buffers if each.table.keys() != each.before.keys() or any(
            each.table[name] is not tensor for name, tensor in each.before.items())]
        self._changed = self._changed or bool(buffers)
        if self._left:
            self._left -= 1
            self.drawn += [source for source, numbers in state.random
                           if source not in self.drawn and _numbers(source.get()) != _numbers(numbers)]
            for weights, marks in zip(self._weights, state.marks, strict=True):
                _check_parameters(weights, marks, self._recomputed)
            if not self._left:
                self._tables = [(path, table) for path, table in self._tables
                                if table and (self._recomputed or any((path, name) in self._copied for name in table))]
                self.inert = not (self._recomputed or self.inputs or self._tables)
        self.changes_buffers = bool(self._left or self._changed)
        return StateBefore(buffers, [(source, numbers) for source, numbers in state.random if source in self.drawn])

    def swap_in(self, state: StateBefore) -> None:
        """Put back the state before a forward, with copies of buffers that forwards change in place."""
        copies: dict[int, Tensor] = {}
        put([(table, {name: copied_once(tensor, copies) if (path, name) in self._copied and _is_copyable(tensor)
                      else tensor for name, tensor in before.items()})
             for path, table, before, *_ in state.buffers], state.random)

    @contextmanager
    def swapped_in(self, state: StateBefore) -> Iterator[None]:
        """Swap in the state before a forward while it runs again, then the present state."""
        buffers = [(each.table, dict(each.table)) for each in state.buffers]
        sources = [(source, source.get()) for source, _ in state.random]
        self.swap_in(state)
        try:
            yield
        finally:
            put(buffers, sources)


def _marks(weights: WeightVersions) -> list[_Mark]:
    """Return marks of the parameters in use, by which a change of them is seen."""
    return [_Mark((leaf._version, local(leaf)._version, sample(local(leaf))), local(leaf).data_ptr(), leaf.grad,
                  0 if leaf.grad is None else leaf.grad._version) for leaf in weights.used]


def _check_parameters(weights: WeightVersions, marks: Sequence[_Mark], recomputed: bool) -> None:
    """Check what a forward, which is ``recomputed`` or not, did to the parameters since their marks.

    Raises:
        UserError: the change would be lost, or would not be trained.
    """
    for name, leaf, before, now in zip(weights.names, weights.used, marks, _marks(weights), strict=True):
        places = weights.slots[name]
        if any(module._parameters.get(own) is not leaf for module, own in places):
            raise UserError(f"'{name}' was replaced by another parameter in a forward, which no optimizer steps",
                            hint="make the parameter when the layer is built, and let an optimizer change it")
        if now.gradient is not before.gradient or now.gradient_version != before.gradient_version:
            raise UserError(f"'{name}' got a gradient in a forward: its layer calls backward() there",
                            hint="take gradients in a forward with torch.autograd.grad, or add the term to the loss")
        if now.memory != before.memory:
            if not weights.moves(name):
                raise UserError(f"'{name}' got other memory in a forward (.data = ...), where its optimizer does "
                                "not find it", hint="change parameters in place, in the optimizer")
        elif now.version != before.version and name in weights.copied:
            raise UserError(f"'{name}' was changed in place by a forward, but other values of it are kept beside: a "
                            "master in fp32, or those of replicas and of stages that it is tied to",
                            hint="change parameters in the optimizer; or let one stage without replicas hold the "
                                 "parameter, in another precision than bf16_pure")
        elif now.version != before.version and (weights.parted or (recomputed and not any(
                getattr(module, "max_norm", None) is not None for module, _ in places))):
            raise UserError(f"'{name}' was changed in place by a forward, which must find it unchanged when it is "
                            "recomputed, or as long as microbatches hold that version of it",
                            hint="change parameters in the optimizer; or choose a schedule with a flush, such as "
                                 "1f1b, and no recompute for the layer (nn.Embedding with max_norm: a flush)")


def put(buffers: Iterable[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]],
        sources: Iterable[tuple[_RandomSource, Any]]) -> None:
    """Let tables hold these buffers, and random sources have these states."""
    for table, content in buffers:
        table.clear()
        table.update(content)
    for source, numbers in sources:
        source.put(numbers)


def _is_copyable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a buffer may be changed in place and copied: one of an earlier graph is replaced, not changed."""
    return tensor is not None and not tensor.requires_grad and tensor.layout is torch.strided


def _keeps_statistics(module: nn.Module) -> bool:
    """Return whether a forward of torch's own changes statistics of the module, which its backward does not read."""
    return getattr(module, "track_running_stats", False) and type(module).__module__.startswith("torch.")


def _random_sources(modules: Iterable[nn.Module]) -> Iterator[_RandomSource]:
    """Yield the sources of random numbers: Python's, NumPy's, and the generators that modules keep."""
    yield _RandomSource(random.getstate, random.setstate)
    yield _RandomSource(np.random.get_state, np.random.set_state)
    for generator in {value for module in modules for value in vars(module).values()
                      if isinstance(value, torch.Generator)}:
        yield _RandomSource(generator.get_state, generator.set_state)


def _numbers(state: Any) -> Any:
    """Return the state of a random source so that two can be compared."""
    if isinstance(state, tuple):  # Python's has all its numbers in one tuple, which compares itself
        return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]
    return state.tolist() if isinstance(state, Tensor) else state


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    one, other = local(one), local(other)
    return torch.equal(one, other) or (one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num())
                                       and torch.equal(one.isnan(), other.isnan()))


def copied_once(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """Return the copy of a tensor, made at its first occurrence."""
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.detach().clone()
    return copies[id(tensor)]


def _copy(tensor: Tensor) -> Tensor:
    """Return the same values in memory of their own, no leaf; the tensor itself where it cannot be changed in place."""
    if tensor.layout is not torch.strided:
        return tensor
    copy = tensor.clone()
    return copy if copy.stride() == tensor.stride() else tensor  # the tensor overlaps itself


def alias(tensor: Tensor) -> Tensor:
    """Return the same memory, no leaf; a change in place counts as one of the tensor, too."""
    if tensor.layout is not torch.strided:
        return tensor
    return Aliases.apply(1, tensor)[0] if tensor.requires_grad else tensor.detach()  # type: ignore[no-untyped-call]


class Aliases(torch.autograd.Function):
    """Return the first ``count`` tensors in the same memory: neither leaves nor views, which could not be changed in
    place. They are one node, on which all tensors lie before them in the graph; those after ``count`` get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.others = (None,) * (len(tensors) - count)
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients, *ctx.others
