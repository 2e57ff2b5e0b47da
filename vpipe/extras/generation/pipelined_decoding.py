"""Generate texts on the ranks of a pipeline: requests are microbatches that go round the stages.

Every request in flight is one message on a ring. Stage 0 sends a pass (which rows continue, and their tokens) with the
activations of its layers; each stage adds its layers' part; the last one chooses the next tokens and sends them to
stage 0, which makes the next pass of them, or begins the next request. Each stage takes what comes from the one before
in the order in which it was sent, so the order of all transfers follows from the choices alone, not from times, and
stage 0 works on one request while the others are at those before.

This cannot deadlock: there is one message per request in flight, and every channel may have as many under way as there
are requests in flight (``under_way`` of the ring), so no send waits for its receive. A rank waits for its oldest
message alone, which is on its way, or with a rank that computes it.

    stage 0   first 0   first 1   first 2   next 0    next 1    next 2    next 0 ...
    stage 1             first 0   first 1   first 2   next 0    next 1    next 2 ...
    stage 2                       first 0   first 1   first 2   next 0    next 1 ...    -> tokens to stage 0
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vpipe.extras.generation.decoding import BeamSearch, Chosen, Request, Sampler, Text, chooser
from vpipe.extras.generation.stage_decoder import Pass, Rows, StageDecoder
from vpipe.runtime import Ring

_END = -1
"""In place of a slot: there are no more requests."""


def in_flight(ranks: int, requests: int) -> int:
    """Return how many requests go round at once: two per rank, so that one waits while another is computed."""
    return min(2 * ranks, requests)


class GenerationRank:
    """One rank of the ring, with the layers of its stage.

    Args:
        ring: rank r has stage r.
        requests: the same on every rank.
    """

    def __init__(self, stage: StageDecoder, ring: Ring, requests: Sequence[Request]) -> None:
        self._stage, self._ring, self._requests = stage, ring, requests

    # -- stage 0 ---------------------------------------------------------------------------------------

    def lead(self) -> Iterator[tuple[int, Chosen]]:
        """Run stage 0: yield every choice as it comes, with the number of its request."""
        waiting = deque(range(len(self._requests)))
        slots = {slot: self._begin(slot, waiting.popleft())
                 for slot in range(in_flight(self._ring.ranks, len(self._requests)))}
        while slots:
            slot, chosen = _parse_choice(*self._ring.receive())
            number, rows = slots[slot]
            yield number, chosen
            if chosen.texts is None:
                self._compute(slot, number, rows.next(chosen))
            elif waiting:
                slots[slot] = self._begin(slot, waiting.popleft())
            else:
                del slots[slot]
        self._ring.send([torch.tensor([_END])])

    def _begin(self, slot: int, number: int) -> tuple[int, Rows]:
        rows = Rows(self._requests[number], self._stage.window, self._stage.cached)
        self._compute(slot, number, rows.first())
        return number, rows

    def _compute(self, slot: int, number: int, one: Pass) -> None:
        rows = [] if one.rows is None else one.rows
        self._ring.send([torch.tensor([slot, number, *rows]), one.ids_rs,
                         *self._stage.run(self._requests[number], slot, one, ())])

    # -- the others ------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Run another stage until there are no more requests."""
        choosers: dict[int, tuple[int, Sampler | BeamSearch]] = {}
        while True:
            head, *tensors = self._ring.receive()
            slot, *words = head.tolist()
            if slot == _END:
                if not self._stage.is_last:
                    self._ring.send([head])
                return
            number, *rows = words
            ids_rs, *received = tensors
            outputs = self._stage.run(self._requests[number], slot, Pass(rows or None, ids_rs), received)
            if not self._stage.is_last:
                self._ring.send([head, ids_rs, *outputs])
                continue
            if slot not in choosers or choosers[slot][0] != number:
                choosers[slot] = number, chooser(self._requests[number].decoding)
            choice = json.dumps([slot, choosers[slot][1].choose(outputs[0])])
            self._ring.send([torch.frombuffer(bytearray(choice.encode()), dtype=torch.uint8)])


def _parse_choice(received: Tensor) -> tuple[int, Chosen]:
    slot, (tokens, parents, texts) = json.loads(received.numpy().tobytes())
    return slot, Chosen(tokens, parents,
                        None if texts is None else [Text(tuple(words), score) for words, score in texts])
