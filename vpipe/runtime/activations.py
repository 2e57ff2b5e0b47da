"""Hold the activations of a microbatch from its forward to its backward, or drop and recompute them (activation
checkpointing).

:mod:`vpipe.description.cut` says which layers recompute; a span of them is dropped and recomputed as one. The
backward recomputes, or an action of the schedule ahead of it (``R``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vpipe.errors import RunError, UserError
from vpipe.model.layer import Layer
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.saved_tensors import SavedTensors
from vpipe.runtime.side_effects import NOTHING, SideEffects, StateBefore
from vpipe.runtime.values import sizes_of
from vpipe.runtime.weight_grad_store import WeightGradStore


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
        carried: to the next slice, by name, after the forward; their gradients before the backward; after it those of
            what the slice before has carried here.
        weight_grads: between the halves, of the spans in the order of backward.
        weightless: whether the loss counts for nothing, so that all gradients are 0, also where the backward has NaN.
        saved: what the graphs save, where it is counted or the schedule may offload it.
    """

    spans: list[SpanActivations]
    fields: Mapping[str, Tensor]
    key: ForwardKey
    pins: dict[int, int]
    split: bool
    carried: dict[str, Tensor] = field(default_factory=dict)
    weight_grads: list[WeightGradStore] = field(default_factory=list)
    weightless: bool = False
    saved: SavedTensors | None = None

    def storages(self) -> dict[StorageWeakRef, int]:
        """Return the bytes of the storages that it holds on its device, without those of weights, as far as it knows
        what its graphs save."""
        if self.saved is None:
            return sizes_of((*self.tensors(), *self.fields.values()))
        held = sizes_of((*self.tensors(), *self.fields.values(), *self.saved.tensors()))
        return {storage: size for storage, size in held.items() if storage not in self.saved.weights}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the known tensors that it holds, without the batch's; its graphs hold more."""
        for span in self.spans:
            yield from span.inputs.values()
        for store in self.weight_grads:
            yield from store.waiting()


def forward_without_activations(effects: SideEffects,
                                forward: Callable[[], dict[str, Tensor]]) -> tuple[StateBefore, dict[str, Tensor]]:
    """Run the forward of a span that is recomputed; return the state before that it changes, and its outputs, by name.

    Its graph saves nothing. Without a graph some layers would compute other numbers (nn.LSTM does). A layer that walks
    the graph within its forward, for gradients of its own, runs again with one that does.
    """
    before = effects.begin_forward()
    if not effects.walks_its_graph:
        try:
            with saved_tensors_hooks(lambda _: None, _refuse_unpacking):
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


class _NothingSavedError(Exception):
    """A graph that has saved nothing was walked."""


def _refuse_unpacking(saved: None) -> Tensor:
    raise _NothingSavedError
