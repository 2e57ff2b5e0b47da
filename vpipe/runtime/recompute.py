"""Recompute activations (activation checkpointing): drop them in the forward, make them again for the backward.

:mod:`vpipe.description.recompute` says which layers do; a span of them is dropped and recomputed as one. The backward
recomputes, or an action of the schedule ahead of it (``R``).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vpipe.errors import RunError, UserError
from vpipe.runtime.activations import Span, SpanActivations, SpanGraph
from vpipe.runtime.side_effects import SideEffects, StateBefore


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
            if not isinstance(error.__cause__, _NothingSavedError):
                raise
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
