"""What passes between a rank's stages and their neighbours: activations forward, gradients back."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence, Sized

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.runtime.microbatches import Segment, Signature
from vpipe.runtime.transport.transport import Key, Spec, Transport

_Seen = tuple[int, int, bool, Signature]
"""Stage, peer, whether in training, the shapes of the batch's fields: what the shapes of activations follow from."""


SCALE = ""
"""Stands among the names of gradients for the scale that they have, where it travels with them; no tensor's name."""


class Neighbours:
    """One rank's part in the transfers between stages.

    Stages on the same rank pass tensors without a transfer. Shapes are announced with the first transfer of their
    kind, so the receives behind it wait for that announcement, in the order of sending.

    Args:
        scales: whether the scale of gradients travels behind them.
    """

    def __init__(self, transport: Transport, scales: bool = False) -> None:
        self._transport, self._scales = transport, scales
        self._arrived: dict[Key, list[Tensor]] = {}  # from a stage on this same rank
        self._leaving: dict[Key, list[Tensor]] = {}
        self._shapes: dict[Key, Signature] = {}  # of the batch that the activations about to leave come from
        self._returning: dict[tuple[int, int], tuple[list[str], list[Spec]]] = {}  # gradients that will come back
        self._incoming: dict[_Seen, list[Spec]] = {}
        # Receives in order, by stage and peer: the first one's shapes are being announced, others are posted after it.
        self._queued: dict[tuple[int, int], deque[tuple[Key, _Seen]]] = defaultdict(deque)
        self._announced: dict[_Seen, list[Spec]] = {}
        self._segment: Segment

    def begin(self, segment: Segment) -> None:
        """What follows is of this segment."""
        self._segment = segment

    def stores(self) -> Mapping[str, Sized]:
        """What must be empty at the end of a segment."""
        return {"arrived tensors": self._arrived, "unsent tensors": self._leaving,
                "expected gradients": self._returning,
                "receives of unknown shape": [key for queue in self._queued.values() for key in queue]}

    def abandon(self) -> None:
        """Drop what is on its way, and what was to come."""
        for store in (self._arrived, self._leaving, self._shapes, self._returning, self._queued):
            store.clear()

    # -- what an action takes and makes

    def activations(self, stage: int, microbatch: int) -> tuple[int, Key]:
        """The transfer that brings a stage its input, and the rank that it comes from."""
        return (self._segment.rounds.rank_of(stage - 1, microbatch),
                Key("F", stage, self._segment.number(microbatch)))

    def gradients(self, stage: int, microbatch: int) -> tuple[int, Key]:
        """The transfer that brings the gradients of a stage's output, and the rank that it comes from."""
        return (self._segment.rounds.rank_of(stage + 1, microbatch),
                Key("B", stage, self._segment.number(microbatch)))

    def ready(self, peer: int, key: Key) -> bool:
        """Whether a transfer can be taken without waiting."""
        return key in self._arrived or (peer != self._transport.rank and self._transport.ready(peer, key))

    def take_activations(self, stage: int, microbatch: int) -> list[Tensor]:
        """What the stage before made; nothing where the pipeline begins."""
        if stage == 0:
            return []
        peer, key = self.activations(stage, microbatch)
        queue = self._queued[stage, peer]
        while any(key == queued for queued, _ in queue):
            self._learn_shapes(peer, queue)
        return self._take(peer, key)

    def take_gradients(self, stage: int, microbatch: int) -> dict[str, Tensor]:
        """The gradients of the outputs that want one, by name."""
        names, _ = self._returning.pop((stage, microbatch))
        return dict(zip(names, self._take(*self.gradients(stage, microbatch)), strict=True))

    def pass_activations(self, stage: int, microbatch: int, signature: Signature, names: Sequence[str],
                         outputs: list[Tensor]) -> None:
        """Hand a stage's outputs on, or keep them for their send.

        Args:
            signature: of the batch that they come from.
            names: of the outputs.
        """
        if self._segment.training:
            wanted = [(name, Spec.of(t)) for name, t in zip(names, outputs, strict=True) if t.requires_grad]
            if self._scales:
                wanted.append((SCALE, Spec((1,), torch.float32, wants_gradient=False)))
            self._returning[stage, microbatch] = ([name for name, _ in wanted], [spec for _, spec in wanted])
        key = Key("F", stage + 1, self._segment.number(microbatch))
        self._pass_on(key, microbatch, outputs)
        if key in self._leaving:
            self._shapes[key] = signature

    def pass_gradients(self, stage: int, microbatch: int, gradients: list[Tensor]) -> None:
        """Hand the gradients of a stage's inputs on, or keep them for their send."""
        self._pass_on(Key("B", stage - 1, self._segment.number(microbatch)), microbatch, gradients)

    def _pass_on(self, key: Key, microbatch: int, tensors: list[Tensor]) -> None:
        here = self._segment.rounds.rank_of(key.stage, microbatch) == self._transport.rank
        (self._arrived if here else self._leaving)[key] = tensors

    def _take(self, peer: int, key: Key) -> list[Tensor]:
        return self._arrived.pop(key) if key in self._arrived else self._transport.take(peer, key)

    # -- transfers

    def send_forward(self, stage: int, microbatch: int) -> None:
        """Send what a stage made to the next one's rank, with its shapes when that cannot know them."""
        key = Key("F", stage + 1, self._segment.number(microbatch))
        tensors, peer = self._leaving.pop(key), self._segment.rounds.rank_of(key.stage, microbatch)
        specs = [Spec.of(t) for t in tensors]
        seen = (key.stage, peer, self._segment.training, self._shapes.pop(key))
        known = self._announced.setdefault(seen, specs)
        if known != specs:
            raise UserError(f"stage {stage} sends {', '.join(map(str, specs))} for microbatch {key.number}, but sent "
                            f"{', '.join(map(str, known))} for another with fields of the same shapes",
                            hint="shapes between stages must follow from the shapes of the batch: pad where they "
                                 "depend on the values")
        self._transport.send(peer, key, tensors, announce=known is specs)

    def post_forward(self, stage: int, microbatch: int) -> None:
        """Get ready for a stage's input."""
        peer, key = self.activations(stage, microbatch)
        seen = (stage, peer, self._segment.training, self._segment.signature(microbatch))
        queue, specs = self._queued[stage, peer], self._incoming.get(seen)
        if not queue:
            self._transport.post(peer, key, specs)
        if queue or specs is None:
            queue.append((key, seen))
            if self._transport.ordered:  # the receive keeps its place among all transfers
                self._learn_shapes(peer, queue)

    def _learn_shapes(self, peer: int, queue: deque[tuple[Key, _Seen]]) -> None:
        """Wait for the announcement at the head of the queue; post what it held up, up to the next unknown shapes.

        In the order of the program, which is that of sending: a transport without tags knows no other.
        """
        key, seen = queue.popleft()
        self._incoming[seen] = self._transport.learn(peer, key)
        while queue:
            key, seen = queue[0]
            specs = self._incoming.get(seen)
            self._transport.post(peer, key, specs)
            if specs is None:
                return
            queue.popleft()

    def send_backward(self, stage: int, microbatch: int) -> None:
        """Send the gradients of a stage's inputs to the rank that made these."""
        key = Key("B", stage - 1, self._segment.number(microbatch))
        self._transport.send(self._segment.rounds.rank_of(key.stage, microbatch), key, self._leaving.pop(key))

    def post_backward(self, stage: int, microbatch: int) -> None:
        """Get ready for the gradients of a stage's outputs."""
        _, specs = self._returning[stage, microbatch]
        self._transport.post(*self.gradients(stage, microbatch),
                             [Spec(spec.shape, spec.dtype, wants_gradient=False) for spec in specs])
