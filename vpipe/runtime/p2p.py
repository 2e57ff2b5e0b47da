"""Point-to-point transfers between stages: activations forward, gradients back."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vpipe.description.cut import KeptInputs
from vpipe.errors import UserError
from vpipe.runtime.microbatches import Segment, Signature
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.transport import (
    SPECS_SPEC,
    TensorSpec,
    TransferKey,
    TransferKind,
    Transport,
    decode_specs,
    specs_as_tensor,
)
from vpipe.runtime.values import Values
from vpipe.schedules.kinds import KEPT, OUTPUT, OUTPUT_GRADIENT

_ACTIVATIONS, _GRADIENTS = TransferKind.ACTIVATIONS, TransferKind.GRADIENTS  # quicker to find, for every transfer
_SPECS = TransferKind.SPECS

_Kind = tuple[bool, torch.dtype | None]
"""Of a segment: whether it is training, and the autocast around it."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_Batch = tuple[_Kind, Signature]
"""The segment and the batch's shapes: these determine what is transferred to a stage from a peer."""

MOST_BATCHES = 1024
"""Shapes of batches that both ends of a transfer know at one time: the ones before are told again."""


class _OutputSpecs(NamedTuple):
    """Specs of a stage's outputs for one batch shape, and of those sent; names and specs of the gradients that come
    back."""

    outputs: list[TensorSpec]
    sent: list[TensorSpec]
    gradient_names: list[str]
    gradients: list[TensorSpec]

    def match(self, outputs: Sequence[Tensor]) -> bool:
        return len(outputs) == len(self.outputs) and all(
            spec.shape == t.shape and spec.dtype is t.dtype and spec.wants_gradient is t.requires_grad
            for spec, t in zip(self.outputs, outputs, strict=True))


def _remember(table: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add an entry to a table; forget the oldest of too many."""
    table[key] = value
    if len(table) > MOST_BATCHES:
        del table[next(iter(table))]


class _Leaving(NamedTuple):
    """Outputs that another rank needs, until they are sent."""

    tensors: list[Tensor]
    specs: list[TensorSpec]
    signature: Signature


class P2PTransfers:
    """Send and receive activations and gradients between the stages of one rank and their neighbours.

    They lie in the rank's values: a list of a stage's outputs, a dict of their gradients by name. A stage on the same
    rank takes them there; a send takes them for another rank, whose transport has them until its stage asks for them.
    Before the first transfer for a new batch shape its specs are sent. Later receives of the stage from the peer are
    posted after they arrive, in send order.

    Args:
        kept: inputs that ranks have, by stage.
    """

    def __init__(self, transport: Transport, kept: Mapping[int, KeptInputs], values: Values) -> None:
        self._transport, self._kept, self.values = transport, kept, values
        self._kept_for = {each.since: stage for stage, each in kept.items()}
        self._specs: dict[tuple[int, _Kind, Signature], _OutputSpecs] = {}  # by stage; of the latest batches
        # By receiving stage and peer, in the order of sending: both ends forget the same ones.
        self._announced: dict[tuple[int, int], dict[_Batch, list[TensorSpec]]] = defaultdict(dict)
        self._incoming: dict[tuple[int, int], dict[_Batch, list[TensorSpec]]] = defaultdict(dict)
        # Receives in order, by stage and peer: the specs of the first are awaited, the others are posted after it.
        self._queued: dict[tuple[int, int], deque[tuple[TransferKey, _Batch]]] = defaultdict(deque)
        self._segment: Segment

    def begin(self, segment: Segment) -> None:
        """Begin a segment."""
        self._queued.clear()  # receives that one process has posted for microbatches which did not come
        self._segment, self._rank_of = segment, segment.assignment.rank_of
        self._kind = segment.training, segment.autocast

    def forget_specs(self) -> None:
        """Announce specs anew from now on, as every rank does."""
        for store in (self._specs, self._announced, self._incoming):
            store.clear()

    # -- inputs and outputs of forwards and backwards ----------------------------------------------------

    def source(self, kind: TransferKind, stage: int, microbatch: int) -> tuple[int, TransferKey]:
        """Return the rank that sends a stage its input, or its outputs' gradients, and the transfer's key."""
        return (self._rank_of(stage - 1 if kind is _ACTIVATIONS else stage + 1, microbatch),
                TransferKey(kind, stage, self._segment.base + microbatch))

    def receive_activations(self, stage: int, microbatch: int) -> list[Tensor]:
        """Return the outputs of the stage before, with those that were kept here; none for the first stage."""
        if stage == 0:
            return []
        received: list[Tensor] | None = self.values.pop((OUTPUT, stage - 1, microbatch), None)
        if received is None:
            peer, key = self.source(_ACTIVATIONS, stage, microbatch)
            queue = self._queued[stage, peer]
            while queue and any(key == queued for queued, _ in queue):
                self._receive_specs(stage, peer)
            received = self._transport.receive(peer, key)
        if stage not in self._kept:
            return received
        there, sent = self.values.pop((KEPT, stage, microbatch)), iter(received)
        return [tensor for name in self._kept[stage].inputs
                for tensor in ([there[name]] if name in there else islice(sent, 1))]

    def receive_gradients(self, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Return the gradients of the outputs that want one, by name."""
        gradients: dict[str, Tensor] | _OutputSpecs = self.values.pop((OUTPUT_GRADIENT, stage, microbatch))
        if isinstance(gradients, _OutputSpecs):
            received = self._transport.receive(*self.source(_GRADIENTS, stage, microbatch))
            return dict(zip(gradients.gradient_names, received, strict=True))
        return gradients

    def put_activations(self, stage: int, microbatch: int, signature: Signature, names: Sequence[str],
                        outputs: list[Tensor]) -> None:
        """Give a stage's outputs to the next stage if it is on this rank; else store for their send what the other rank
        does not have. Keep what a later stage of this rank needs."""
        specs = self._specs.get((stage, self._kind, signature))
        if specs is None or not specs.match(outputs):
            specs = self._specs_of(stage, names, outputs)
            _remember(self._specs, (stage, self._kind, signature), specs)
        if self._segment.training and self._segment.assignment.trains(stage):
            self.values[OUTPUT_GRADIENT, stage, microbatch] = specs
        if stage in self._kept_for:
            later = self._kept_for[stage]
            # Another leaf of the same memory: within one process the stages between read this one.
            self.values[KEPT, later, microbatch] = {name: t.detach().requires_grad_(t.requires_grad)
                                                     for name, t in zip(names, outputs, strict=True)
                                                     if name in self._kept[later].names}
        if stage + 1 in self._kept:
            there = self._kept[stage + 1].names
            outputs = [t for name, t in zip(names, outputs, strict=True) if name not in there]
        here = self._rank_of(stage + 1, microbatch) == self._transport.rank
        self.values[OUTPUT, stage, microbatch] = outputs if here else _Leaving(outputs, specs.sent, signature)

    def put_stand_ins(self, stage: int, microbatch: int, signature: Signature, of: Stage) -> None:
        """Put something in place of outputs that could not be computed: zeros, or nothing where the other rank does not
        know their specs."""
        known = self._specs.get((stage, self._kind, signature))
        outputs = [] if known is None else [
            torch.zeros(spec.shape, dtype=spec.dtype, device=of.device).requires_grad_(spec.wants_gradient)
            for spec in known.outputs]
        self.put_activations(stage, microbatch, signature, of.spec.outputs[:len(outputs)], outputs)

    def put_gradients(self, stage: int, microbatch: int, gradients: list[Tensor]) -> None:
        """Give the gradients of a stage's inputs to the stage before, or store them for their send."""
        expected: _OutputSpecs | None = self.values.get((OUTPUT_GRADIENT, stage - 1, microbatch))
        self.values[OUTPUT_GRADIENT, stage - 1, microbatch] = gradients if expected is None else dict(
            zip(expected.gradient_names, gradients, strict=True))

    def _specs_of(self, stage: int, names: Sequence[str], outputs: Sequence[Tensor]) -> _OutputSpecs:
        specs = [TensorSpec.from_tensor(t) for t in outputs]
        there = self._kept[stage + 1].names if stage + 1 in self._kept else ()
        sent = [spec for name, spec in zip(names, specs, strict=True) if name not in there]
        wanted = [(name, TensorSpec(spec.shape, spec.dtype, wants_gradient=False))
                  for name, spec in zip(names, specs, strict=True) if spec.wants_gradient]
        return _OutputSpecs(specs, sent, [name for name, _ in wanted], [spec for _, spec in wanted])

    # -- SEND_F, RECV_F, SEND_B, RECV_B --------------------------------------------------------------------

    def send_activations(self, stage: int, microbatch: int) -> None:
        """Send a stage's outputs to the next stage, and before them their specs if it does not know them."""
        key = TransferKey(_ACTIVATIONS, stage + 1, self._segment.base + microbatch)
        peer, leaving = self._rank_of(key.stage, microbatch), self.values.pop((OUTPUT, stage, microbatch))
        tensors, specs, signature = leaving
        announced, batch = self._announced[key.stage, peer], (self._kind, signature)
        known = announced.get(batch)
        if known is None:
            if self._transport.needs_specs:
                self._transport.send(peer, key._replace(kind=_SPECS), [specs_as_tensor(specs)])
            _remember(announced, batch, specs)
        elif known is not specs and known != specs:
            alike = [str(spec) for spec in specs] == [str(spec) for spec in known]
            now, then = (", ".join(f"{spec}{' with a gradient' * (alike and spec.wants_gradient)}" for spec in each)
                         for each in (specs, known))
            raise UserError(f"stage {stage} sends {now} for {self._segment.describe(microbatch)}, but sent {then} for "
                            "another with fields of the same shapes",
                            hint="freeze a whole stage before the pipeline is built" if alike else
                                 "shapes between stages must follow from the shapes of the batch: pad where they "
                                 "depend on the values")
        self._transport.send(peer, key, tensors)

    def post_activations(self, stage: int, microbatch: int) -> None:
        """Post the receive of a stage's input."""
        peer, key = self.source(_ACTIVATIONS, stage, microbatch)
        if not self._transport.needs_specs:
            self._transport.post(peer, key, ())
            return
        queue = self._queued[stage, peer]
        queue.append((key, (self._kind, self._segment.loader.signature(self._segment.first + microbatch))))
        if len(queue) == 1:
            self._post_queued(stage, peer)
        if queue and self._transport.ordered:  # the receive keeps its place among all transfers
            self._receive_specs(stage, peer)

    def _post_queued(self, stage: int, peer: int) -> None:
        """Post the receives in the queue, in send order; the first one of unknown specs waits for these."""
        queue, incoming = self._queued[stage, peer], self._incoming[stage, peer]
        while queue:
            key, batch = queue[0]
            if (specs := incoming.get(batch)) is None:
                self._transport.post(peer, key._replace(kind=_SPECS), [SPECS_SPEC])
                return
            self._transport.post(peer, key, specs)
            queue.popleft()

    def _receive_specs(self, stage: int, peer: int) -> None:
        """Wait for the specs at the head of the queue, and post what waits for them."""
        key, batch = self._queued[stage, peer][0]
        [told] = self._transport.receive(peer, key._replace(kind=_SPECS))
        _remember(self._incoming[stage, peer], batch, decode_specs(told.numpy().tobytes()))
        self._post_queued(stage, peer)

    def send_gradients(self, stage: int, microbatch: int) -> None:
        """Send the gradients of a stage's inputs to the stage before."""
        key = TransferKey(_GRADIENTS, stage - 1, self._segment.base + microbatch)
        gradients = self.values.pop((OUTPUT_GRADIENT, stage - 1, microbatch))
        self._transport.send(self._rank_of(key.stage, microbatch), key, gradients)

    def post_gradients(self, stage: int, microbatch: int) -> None:
        """Post the receive of the gradients of a stage's outputs."""
        expected: _OutputSpecs = self.values[OUTPUT_GRADIENT, stage, microbatch]
        self._transport.post(*self.source(_GRADIENTS, stage, microbatch), expected.gradients)
