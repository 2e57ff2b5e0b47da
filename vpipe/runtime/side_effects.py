"""Undo and repeat the side effects of layers' forwards: inputs changed in place, buffers, attributes of modules.

A layer that changes its input in place (``nn.ReLU(inplace=True)``) is given an alias where nobody else needs the input,
and a copy where somebody does. A recomputed layer finds buffers and attributes as its first forward found them, and
leaves them as it found them: statistics advance once, and a layer that reads what it changes computes the same again.
If autograd saves a buffer that the layer later changes in place, every forward gets its own copy of it, because several
microbatches are in flight. The states of Python's, NumPy's and the modules' own generators are saved and restored;
torch's default ones are seeded again before each layer.

The first forwards show what changes: before them everything that could change is copied. Later ones copy only what
changes. Changes inside of other objects that a layer keeps, such as a list, are not found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from vpipe.errors import UserError
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.weight_versions import WeightVersions

WATCHED = 3
"""Number of first forwards that show what a layer changes: a layer may begin its statistics in the second one."""

_MODULE_TABLES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, such as ``_parameters``: torch's own tables."""

_ABSENT = object()


class _Slot(NamedTuple):
    """A place where a module keeps a value that a forward may change: a table, a key in it, its name in errors.

    ``statistics``: whether the module is one of torch's own normalisations, whose backward does not read the value.
    """

    table: dict[str, Any]
    key: str
    label: str
    statistics: bool

    @property
    def place(self) -> tuple[int, str]:
        """Return the identity of the slot."""
        return id(self.table), self.key

    def get(self) -> Any:
        return self.table.get(self.key, _ABSENT)

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


class _SlotValue(NamedTuple):
    """The value of a slot before a forward; of a tensor also its version, the number of references to it, and a copy
    where forwards may change it in place."""

    slot: _Slot
    value: Any
    copy: Tensor | None = None
    version: int = 0
    references: int = 0

    def is_replaced(self) -> bool:
        """Return whether the slot has another value now."""
        now = self.slot.get()
        return now is not self.value and _is_plain(now)

    def is_changed_in_place(self) -> bool:
        """Return whether a tensor of which there is a copy has changed."""
        return self.copy is not None and (self.value._version != self.version or not _equal(self.value, self.copy))


class _RandomSource(NamedTuple):
    """A source of random numbers: get its state, and put it back."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


class StateBefore(NamedTuple):
    """The state before a forward that the forward may change: values of modules, states of random sources.

    ``inputs``: before one of the first forwards those that others need, too, by name, each with a copy.
    """

    values: Sequence[_SlotValue] = ()
    random: Sequence[tuple[_RandomSource, Any]] = ()
    inputs: Mapping[str, tuple[Tensor, Tensor]] = {}

    def swap_in(self) -> None:
        """Put the values, or the copies of those that may have changed, into their slots; set the random states.

        The tensors that stand in the slots are replaced, not written to.
        """
        for old in self.values:
            old.slot.put(old.value if old.copy is None else old.copy)
        for source, state in self.random:
            source.put(state)


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
        walks_its_graph: whether a layer takes gradients of its own within its forward.
        backwards_left: how many backwards are still to be watched.
        inert: whether nothing is to be done from now on: the layers are not recomputed, and their first forwards have
            changed nothing.
    """

    def __init__(self, layers: Mapping[str, nn.Module], recomputed: bool, weights: Iterable[WeightVersions]) -> None:
        self._layers, self._recomputed, self._weights = layers, recomputed, list(weights)
        self._left = WATCHED  # first forwards that are still to come
        self.inputs: set[str] = set()
        self._changing: dict[tuple[int, str], tuple[_Slot, bool]] = {}  # slots that forwards change; True: in place
        self._saved: dict[tuple[int, str], _Slot] = {}  # of these, slots whose tensors autograd saves
        self._constant: list[_Slot] = []  # slots of tensors that none of the first forwards has changed
        self._sources = list(_random_sources(part for module in layers.values() for part in module.modules()))
        self._drawn: list[_RandomSource] = []  # of these, sources that forwards draw from
        self.backwards_left = WATCHED
        self.walks_its_graph = self.inert = False

    # -- inputs

    def prepare_inputs(self, inputs: Mapping[str, Tensor], again: bool) -> dict[str, Tensor]:
        """Return the inputs to call the layers with; ``again``: a forward has shown which of them it changes."""
        if again or not self._left:
            return {name: self._own(t) if name in self.inputs else t for name, t in inputs.items()}
        return {name: _copy(t) if self._recomputed else _alias(t) for name, t in inputs.items()}

    def _own(self, tensor: Tensor) -> Tensor:
        return _alias(tensor) if not self._recomputed and _is_alone(tensor) else _copy(tensor)

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

    def begin_forward(self, inputs: Mapping[str, Tensor]) -> StateBefore | None:
        """Prepare a forward whose graph stays; return the state before it, if it is one of the first."""
        copies: dict[int, Tensor] = {}
        for old in [_slot_value(slot, True, copies) for slot in self._saved.values()]:
            if old.copy is not None:
                old.slot.put(old.copy)
        if not self._left:
            return None
        return self.capture()._replace(inputs={name: (tensor, tensor.detach().clone())
                                               for name, tensor in inputs.items() if not _is_alone(tensor)})

    def write_back_if_inputs_changed(self, before: StateBefore) -> bool:
        """Return whether a forward has changed an input that others need; if so, write back all that was before it."""
        changed = {name: (tensor, copy) for name, (tensor, copy) in before.inputs.items()
                   if not _equal(tensor.detach(), copy)}
        self.inputs.update(changed)
        for tensor, copy in changed.values():
            tensor.data.copy_(copy)
        if changed:
            self.write_back(before)
        return bool(changed)

    @contextmanager
    def watched_backward(self, in_flight: int) -> Iterator[None]:
        """Check that one of the first backwards changes no value that forwards of ``in_flight`` microbatches change.

        Raises:
            UserError: it does, such as by computing a forward again.
        """
        self.backwards_left -= 1
        before = self.capture(everything=True)
        yield
        for old in before.values:
            if old.slot.place in self._changing and (old.is_replaced() or old.is_changed_in_place()):
                raise UserError(f"'{old.slot.label}', which forwards change, was changed by a backward, when those of "
                                f"{in_flight - 1} later microbatches had changed it, too",
                                hint="leave torch.utils.checkpoint, which computes a forward again, out of the layer: "
                                     "recompute=... does that here; and change it in no hook of a backward")

    # -- values of modules

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check the effect of one of the first forwards on parameters.

        Raises:
            UserError: the change could not be undone for a recompute, or no optimizer would train the parameter.
        """
        if not self._left:
            yield
            return
        before, frozen = [weights.marks() for weights in self._weights], self._sums_of_frozen()
        yield
        for name, total in self._sums_of_frozen().items():
            if frozen.get(name, total) != total:
                raise UserError(f"'{name}', which is not trained, was changed by a forward: a recompute would change "
                                "it again", hint="leave the layer out of recompute, or make it a buffer")
        self._left -= 1
        for weights, marks in zip(self._weights, before, strict=True):
            weights.check_forward(marks, self._recomputed)
        self.inert = not (self._left or self._recomputed or self.inputs or self._changing)

    def _sums_of_frozen(self) -> dict[str, int]:
        """Return checksums of the parameters that are not trained, for the first forward of recomputed layers."""
        if not self._recomputed or self._left < WATCHED:
            return {}
        return {name: int(parameter.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
                for layer, module in self._layers.items() for name, parameter in module.named_parameters(prefix=layer)
                if not parameter.requires_grad and parameter.layout is torch.strided}

    def capture(self, everything: bool = False) -> StateBefore:
        """Return the state that the next forward may change; with ``everything`` all that any forward could change."""
        everything = everything or bool(self._left)
        slots = ([(slot, True) for slot in self._slots()] if everything
                 else [*self._changing.values(), *((slot, False) for slot in self._constant)])
        copies: dict[int, Tensor] = {}  # by identity: a buffer in two slots gets one copy
        return StateBefore([_slot_value(slot, in_place, copies) for slot, in_place in slots],
                           [(source, source.get()) for source in (self._sources if everything else self._drawn)])

    def record_changes(self, before: StateBefore) -> StateBefore:
        """Return the part of :meth:`capture` that the forward has changed; note it, for later ones copy only that.

        Raises:
            UserError: a buffer changed in place for the first time, but was not copied.
        """
        values = list(before.values)
        if self._left:
            known = {old.slot.place for old in values}
            values += (_SlotValue(slot, _ABSENT) for slot in self._slots() if slot.place not in known)
        for old in values:
            slot, was = self._changing.get(old.slot.place, (old.slot, False))
            if was and not self._left:
                continue  # it is copied before every forward
            if not self._left and _version(old.value) != old.version:
                raise UserError(f"'{slot.label}' was changed by a forward, which none of the first {WATCHED} forwards "
                                "did: a recompute would find it changed", hint="leave the layer out of recompute")
            in_place = old.is_changed_in_place()
            if in_place or old.is_replaced():
                self._changing[slot.place] = slot, in_place or was
            if (in_place and not self._recomputed and not slot.statistics
                    and old.value._use_count() > old.references):
                self._saved[slot.place] = slot
        if self._left:
            self._constant = [slot for slot in self._slots() if isinstance(slot.get(), Tensor)]
            self._drawn += [source for source, state in before.random
                            if source not in self._drawn and _numbers(source.get()) != _numbers(state)]
        self._constant = [slot for slot in self._constant if slot.place not in self._changing]
        return StateBefore([old for old in values if old.slot.place in self._changing],
                           [(source, state) for source, state in before.random if source in self._drawn])

    @property
    def may_share(self) -> bool:
        """Return whether an output may lie in memory that the next forward changes in place."""
        return bool(self._left or self._changing)

    @property
    def draws(self) -> bool:
        """Return whether forwards draw from random sources other than torch's own."""
        return bool(self._drawn)

    def unshare(self, output: Tensor) -> Tensor:
        """Return an output, or a copy if it shares memory that the next forward may change in place."""
        slots = self._slots() if self._left else (slot for slot, in_place in self._changing.values() if in_place)
        mine = {old.untyped_storage().data_ptr() for slot in slots
                if isinstance(old := slot.table.get(slot.key), Tensor) and old.layout is torch.strided}
        shares = mine and output.layout is torch.strided and output.untyped_storage().data_ptr() in mine
        return output.clone() if shares else output

    @contextmanager
    def swapped_in(self, before: StateBefore) -> Iterator[None]:
        """Swap in the state before a forward while it runs again, then the present state.

        Raises:
            UserError: the forward changes a present value.
        """
        now = StateBefore([_SlotValue(old.slot, value := old.slot.get(), version=_version(value))
                           for old in before.values], [(source, source.get()) for source, _ in before.random])
        before.swap_in()
        try:
            yield
        finally:
            now.swap_in()
        for old in now.values:
            if _version(old.value) != old.version:
                raise UserError(f"'{old.slot.label}' is changed by a recompute, which was given another tensor in its "
                                "place: its layer keeps a reference beside the module's own",
                                hint="read the buffer from its module in every forward, as in self.mean")

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Write the present state back at the end, also after an error."""
        before = self.capture(everything=True)
        try:
            yield
        finally:
            self.write_back(before)

    def write_back(self, before: StateBefore) -> None:
        """Write the state before a forward back: into the slots, and into tensors that were changed in place."""
        for old in before.values:
            old.slot.put(old.value)
            if old.copy is not None:
                old.value.data.copy_(old.copy)
        for source, state in before.random:
            source.put(state)
        if self._left:
            known = {old.slot.place for old in before.values}
            for slot in list(self._slots()):
                if slot.place not in known:
                    slot.put(_ABSENT)

    def _slots(self) -> Iterator[_Slot]:
        """Yield the places where modules keep buffers, and attributes that are values."""
        for layer, module in self._layers.items():
            for path, part in module.named_modules(prefix=layer):
                statistics = isinstance(part, _NormBase) and type(part).__module__.startswith("torch.")
                for table in (part._buffers, vars(part)):
                    for key, value in table.items():
                        if (table is part._buffers or key not in _MODULE_TABLES) and _is_plain(value):
                            yield _Slot(table, key, f"{path}.{key}", statistics)


def _is_plain(value: Any) -> bool:
    """Return whether an attribute holds values alone, and leads to no parameter."""
    if isinstance(value, Tensor):
        return not (value.requires_grad and value.is_leaf)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is _ABSENT or value is None or isinstance(value, (int, float, complex, str))


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _slot_value(slot: _Slot, in_place: bool, copies: dict[int, Tensor]) -> _SlotValue:
    value = slot.get()
    if not isinstance(value, Tensor) or value.requires_grad:  # an earlier graph's may be replaced, not changed
        return _SlotValue(slot, value, version=_version(value))
    if in_place and id(value) not in copies:
        copies[id(value)] = value.detach().clone()
    return _SlotValue(slot, value, copies[id(value)] if in_place else None, value._version,
                      value._use_count())  # type: ignore[attr-defined]


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


def _equal(one: Tensor, other: Tensor) -> bool:
    one, other = local(one), local(other)
    if one.layout is not torch.strided:
        return True  # there is no copy of a tensor without strides
    return torch.equal(one, other) or (one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num())
                                       and torch.equal(one.isnan(), other.isnan()))


def _references(tensor: Tensor) -> int:
    """Return the number of references to a tensor's memory, this call's among them."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = _references(torch.empty(1))


def _is_alone(tensor: Tensor) -> bool:
    """Return whether nothing else uses a tensor's memory, such as the graph of the stage that made it."""
    return _references(tensor) <= _ALONE


def _copy(tensor: Tensor) -> Tensor:
    """Return the same values in memory of their own, no leaf; the tensor itself where it cannot be changed in place."""
    if tensor.layout is not torch.strided:
        return tensor
    copy = tensor.clone()
    return copy if copy.stride() == tensor.stride() else tensor  # the tensor overlaps itself


def _alias(tensor: Tensor) -> Tensor:
    """Return the same memory, no leaf, that counts changes in place by itself."""
    if tensor.layout is not torch.strided:
        return tensor
    return _Alias.apply(tensor) if tensor.requires_grad else tensor.data  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    """The identity, in the same memory: neither a leaf nor a view, which could not be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]
