"""Generate texts on the ranks of a pipeline: requests are microbatches that go round the stages.

Every request in flight is one message on a ring. Stage 0 sends a pass (which rows continue, and their tokens) with the
activations of its layers; each stage adds its layers' part; the last one chooses the next tokens and sends them to
stage 0, which makes the next pass of them, or begins the next request. Each stage takes what comes from the one before
in the order in which it was sent, so the order of all transfers follows from the choices alone, not from times, and
stage 0 works on one request while the others are at those before.

This cannot deadlock: there is one message per request in flight, and every channel may have as many under way as there
are requests in flight (``in_flight`` of the transport), so no send waits for its receive. A rank waits for its oldest
message alone, which is on its way, or with a rank that computes it.

    stage 0   first 0   first 1   first 2   next 0    next 1    next 2    next 0 ...
    stage 1             first 0   first 1   first 2   next 0    next 1    next 2 ...
    stage 2                       first 0   first 1   first 2   next 0    next 1 ...    -> tokens to stage 0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vpipe.extras.generation.generate import (
    BeamSearch,
    Chosen,
    Pass,
    Request,
    Rows,
    Sampler,
    StageDecoder,
    Text,
    chooser,
)
from vpipe.runtime.transport.transport import TransferKey, Transport, as_bytes, from_bytes

_END = -1
"""In place of a slot: there are no more requests."""


def in_flight(ranks: int, requests: int) -> int:
    """Return how many requests go round at once: two per rank, so that one waits while another is computed."""
    return min(2 * ranks, requests)


class GenerationRank:
    """One rank of the ring, with the layers of its stage.

    Args:
        transport: of ``ranks`` ranks, two at least; rank r has stage r.
        requests: the same on every rank.
    """

    def __init__(self, stage: StageDecoder, transport: Transport, ranks: int, requests: Sequence[Request]) -> None:
        self._stage, self._transport, self._ranks, self._requests = stage, transport, ranks, requests
        self._rank = transport.rank
        self._sent = self._received = 0

    # -- stage 0 ---------------------------------------------------------------------------------------

    def lead(self) -> Iterator[tuple[int, Chosen]]:
        """Run stage 0: yield every choice as it comes, with the number of its request."""
        waiting = deque(range(len(self._requests)))
        slots = {slot: self._begin(slot, waiting.popleft())
                 for slot in range(in_flight(self._ranks, len(self._requests)))}
        while slots:
            slot, chosen = _parse_choice(*self._receive())
            number, rows = slots[slot]
            yield number, chosen
            if chosen.texts is None:
                self._compute(slot, number, rows.next(chosen))
            elif waiting:
                slots[slot] = self._begin(slot, waiting.popleft())
            else:
                del slots[slot]
        self._send([torch.tensor([_END])])

    def _begin(self, slot: int, number: int) -> tuple[int, Rows]:
        rows = Rows(self._requests[number], self._stage.window, self._stage.cached)
        self._compute(slot, number, rows.first())
        return number, rows

    def _compute(self, slot: int, number: int, one: Pass) -> None:
        rows = [] if one.rows is None else one.rows
        self._send([torch.tensor([slot, number, *rows]), one.ids_rs,
                    *self._stage.run(self._requests[number], slot, one, ())])

    # -- the others ------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Run another stage until there are no more requests."""
        choosers: dict[int, tuple[int, Sampler | BeamSearch]] = {}
        while True:
            head, *tensors = self._receive()
            slot, *words = head.tolist()
            if slot == _END:
                if not self._stage.is_last:
                    self._send([head])
                return
            number, *rows = words
            ids_rs, *received = tensors
            outputs = self._stage.run(self._requests[number], slot, Pass(rows or None, ids_rs), received)
            if not self._stage.is_last:
                self._send([head, ids_rs, *outputs])
                continue
            if slot not in choosers or choosers[slot][0] != number:
                choosers[slot] = number, chooser(self._requests[number].decoding)
            self._send([as_bytes([slot, choosers[slot][1].choose(outputs[0])])])

    # -- transfers -------------------------------------------------------------------------------------

    def _send(self, tensors: Sequence[Tensor]) -> None:
        peer = (self._rank + 1) % self._ranks
        self._transport.send(peer, TransferKey("F", peer, self._sent), tensors, announce=True)
        self._sent += 1

    def _receive(self) -> list[Tensor]:
        """Wait for the next message of the stage before."""
        peer, key = (self._rank - 1) % self._ranks, TransferKey("F", self._rank, self._received)
        self._transport.post(peer, key, None)
        self._received += 1
        self._transport.receive_specs(peer, key)
        return self._transport.receive(peer, key)


def _parse_choice(received: Tensor) -> tuple[int, Chosen]:
    slot, (tokens, parents, texts) = from_bytes(received)
    return slot, Chosen(tokens, parents,
                        None if texts is None else [Text(tuple(words), score) for words, score in texts])
