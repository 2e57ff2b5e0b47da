"""Hold the activations of a microbatch from its forward to its backward, or drop and recompute them (activation
checkpointing); count their bytes.

:mod:`vpipe.description.recompute` says which layers recompute; a span of them is dropped and recomputed as one. The
backward recomputes, or an action of the schedule ahead of it (``R``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vpipe.errors import RunError, UserError
from vpipe.model.layer import Layer
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.side_effects import NOTHING, SideEffects, StateBefore
from vpipe.runtime.slices import SequenceSlice
from vpipe.runtime.weight_grad_store import WeightGradStore
from vpipe.torch_private import hooks_for_saved

DropoutKey = tuple[int, int]
"""(update, microbatch within the update): with the layer's index it fixes the random numbers of a layer."""


@dataclass(frozen=True)
class Span:
    """Consecutive layers, with numbers and modules, whose activations are kept, or dropped and recomputed, together.

    Attributes:
        carried: by number of the layer, the names of what it carries from a slice of a sequence to the next.
    """

    layers: tuple[tuple[int, Layer, nn.Module], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    recomputed: bool
    effects: SideEffects
    carried: Mapping[int, tuple[str, ...]]


@dataclass(slots=True)
class SpanGraph:
    """The autograd edges of a span's outputs; for a split backward also the store of weight gradients that can wait."""

    edges: dict[str, GradientEdge]
    weight_grads: WeightGradStore | None


@dataclass(slots=True)
class SpanActivations:
    """The activations of one span.

    Attributes:
        inputs: as leaves.
        graph: None until it is recomputed.
        before: of a recomputed span, the state that its forward has changed, as it was before.
        versions: of a recomputed span, those of its inputs.
    """

    inputs: dict[str, Tensor]
    graph: SpanGraph | None
    before: StateBefore = NOTHING
    versions: Sequence[int] = ()


@dataclass(slots=True)
class Record:
    """The record of a microbatch for its backward; dropped as soon as it is used.

    Attributes:
        spans: their activations, in order.
        fields: of the batch.
        pins: weight version per owner of weights: the stage itself, and those it borrows from.
        split: whether the backward comes in two halves.
        slice: None of a whole microbatch.
        carried: to the next slice, by name, after the forward; their gradients before the backward.
        carried_gradients: of what the slice before has carried here, after the backward.
        weight_grads: between the halves, of the spans in the order of backward.
        weightless: whether the loss counts for nothing, so that all gradients are 0, also where the backward has NaN.
    """

    spans: list[SpanActivations]
    fields: Mapping[str, Tensor]
    key: DropoutKey
    pins: dict[int, int]
    split: bool
    slice: SequenceSlice | None = None
    carried: dict[str, Tensor] = field(default_factory=dict)
    carried_gradients: dict[str, Tensor] = field(default_factory=dict)
    weight_grads: list[WeightGradStore] = field(default_factory=list)
    weightless: bool = False


def forward_without_activations(effects: SideEffects,
                                forward: Callable[[], dict[str, Tensor]]) -> tuple[StateBefore, dict[str, Tensor]]:
    """Run the forward of a span that is recomputed; return the state before that it changes, and its outputs, by name.

    Its graph saves nothing. Without a graph some layers would compute other numbers (nn.LSTM does). A layer that walks
    the graph within its forward, for gradients of its own, runs again with one that does.
    """
    before = effects.begin_forward()
    if not effects.walks_its_graph:
        try:
            with saved_tensors_hooks(_save_nothing, _refuse_unpacking):
                outputs = forward()
                return effects.record_changes(before), outputs
        except RunError as error:
            if not isinstance(error.__cause__, _NothingSavedError) and "saved tensor hooks" not in error.what:
                raise  # the second is torch.func's
        effects.walks_its_graph = True
        effects.swap_in(before)
        before = effects.begin_forward()
    outputs = forward()
    return effects.record_changes(before), outputs


def recompute_span(span: Span, saved: SpanActivations,
                   forward: Callable[[], tuple[SpanGraph, dict[str, Tensor]]]) -> SpanGraph:
    """Run the forward of a span again, now with a graph; from the same inputs, weights, random numbers and buffers.

    Raises:
        UserError: an input has changed since the first forward.
        RunError: a layer raised an error.
    """
    if saved.versions and saved.versions != [t._version for t in saved.inputs.values()]:
        raise UserError(f"layer '{span.layers[0][1].name}' is recomputed, but its input was changed in place by a "
                        "later layer, to which it was passed on",
                        hint="use the operation that is not in place there (inplace=False)")
    for leaf in saved.inputs.values():
        leaf._backward_hooks = None  # of the graph that was dropped; the layers register theirs again
    try:
        with span.effects.swapped_in(saved.before):
            return forward()[0]
    except RunError as error:
        error.what = f"recomputing for a backward, {error.what}"
        raise


def _save_nothing(saved: Tensor) -> None:
    """Drop a tensor that the graph would save: no backward will use it."""


class _NothingSavedError(Exception):
    """A graph that has saved nothing was walked."""


def _refuse_unpacking(saved: None) -> Tensor:
    raise _NothingSavedError


class SavingHooks:
    """Hooks of vpipe's for tensors that autograd saves, which change no number. They are called with each tensor."""

    def __call__(self, saved: Tensor) -> object:
        raise NotImplementedError


class ActivationCounter(SavingHooks):
    """Count the bytes that the graphs of one microbatch save, by storage.

    It hooks into the saving of tensors by autograd, and changes no number. It holds no storage: one that was freed no
    longer counts. Tensors without strides (sparse ones) are not counted. Autograd does not check whether tensors that
    hooks handle are changed in place before they are used; the counter does.

    Args:
        before: those that hold longer and count what both hold: of the slice before, such as keys, and of the same
            microbatch on an earlier stage of the rank, whose output is this one's input.
    """

    def __init__(self, before: Sequence[ActivationCounter] = ()) -> None:
        self._before, self._held = before, frozenset[StorageWeakRef]()
        self._saved: dict[StorageWeakRef, int] = {}
        self._fields: dict[StorageWeakRef, int] = {}  # of the batch, which the record drops before the weight half

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors that are saved meanwhile."""
        with saved_tensors_hooks(self, unpack_unchanged):
            yield

    def __call__(self, saved: Tensor) -> tuple[Tensor, int]:
        _add(self._saved, saved)
        return saved.detach(), saved._version  # an operation's output would hold the graph that holds it

    def saved(self) -> dict[StorageWeakRef, int]:
        """Return the bytes of saved storages that were not freed."""
        return {storage: size for storage, size in self._saved.items() if not storage.expired()}  # type: ignore[no-untyped-call]

    def bytes(self, record: Record, modules: Iterable[nn.Module]) -> int:
        """Return the bytes that the record holds now: every storage once, without the modules' weights and buffers.

        A field of the batch counts by its own size: its storage is that of the whole batch.
        """
        there = self.saved()
        for tensor in (*(t for saved in record.spans for t in saved.inputs.values()),
                       *(t for store in record.weight_grads for t in store.waiting())):
            _add(there, tensor)
        elsewhere = frozenset().union(*(each._held for each in self._before))
        self._held = elsewhere | there.keys()
        there = {storage: size for storage, size in there.items() if storage not in elsewhere}
        self._fields |= {storage_of(field): min(field.nbytes, bytes_of([field])) for field in record.fields.values()}
        there |= {storage: size for storage, size in self._fields.items() if record.fields or storage in there}
        for module in modules:
            for shared in (*module.parameters(), *module.buffers()):
                if shared.layout is torch.strided:
                    there.pop(storage_of(shared), None)
        return sum(there.values())


def only_ours() -> bool:
    """Return whether the hooks for saved tensors in force, if any, are vpipe's."""
    hooks = hooks_for_saved(True)
    return hooks is None or isinstance(hooks[0], SavingHooks)


def saving_hooks() -> SavingHooks | None:
    """Return the hooks for saved tensors in force, if they are vpipe's."""
    hooks = hooks_for_saved(True)
    return hooks[0] if hooks is not None and isinstance(hooks[0], SavingHooks) else None


def _add(storages: dict[StorageWeakRef, int], tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        storages.setdefault(storage_of(tensor), local(tensor).untyped_storage().nbytes())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors; several may share one."""
    storages: dict[StorageWeakRef, int] = {}
    for tensor in tensors:
        _add(storages, tensor)
    return sum(storages.values())


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a reference to the storage of a tensor, equal for all that share it."""
    return StorageWeakRef(local(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def unpack_unchanged(packed: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; raise autograd's own error if it was changed in place meanwhile."""
    saved, version = packed
    if saved._version != version:  # which it shares with the tensor that it was detached from
        raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                           f"operation: [{saved.type()} {list(saved.shape)}] is at version {saved._version}; expected "
                           f"version {version} instead")
    return saved
