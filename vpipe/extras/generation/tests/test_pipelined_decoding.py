"""Texts generated on several ranks are those of one process, whatever else goes round with them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from time import sleep

import pytest
import torch

from vpipe.app.families.gpt import GptConfig, gpt
from vpipe.app.families.llama import LlamaConfig, llama
from vpipe.errors import UserError
from vpipe.extras.generation.decoding import Chosen, Decoding, Request, Text
from vpipe.extras.generation.pipelined_decoding import GenerationRank, in_flight
from vpipe.extras.generation.stage_decoder import DecoderModel, StageDecoder, decode
from vpipe.model.model import Model
from vpipe.runtime.transport.ring import Ring
from vpipe.runtime.transport.transport import InProcessTransport, Mailbox, TensorSpec, TransferKey

GPT = gpt(GptConfig(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3))
LLAMA = llama(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.3))
REQUESTS = [Request(tuple(prompt), Decoding(tokens, 38, **decoding)) for prompt, tokens, decoding in (
    ([1, 2, 3], 6, {"temperature": 0}), ([4], 14, {"seed": 1}), ([5, 6], 6, {"beams": 3, "best": 2, "end": 7}),
    ([9] * 14, 5, {"seed": 2, "top_p": 0.7}), ([1, 2], 1, {}), ([8, 9], 9, {"beams": 4, "end": 30}),
    ([4], 14, {"seed": 1}))]


class WaitingTransport(InProcessTransport):
    """Waits for the messages of ranks in other threads, until one of these has failed."""

    def __init__(self, rank: int, mailbox: Mailbox, failures: list[Exception]) -> None:
        super().__init__(rank, mailbox)
        self.failures = failures

    def receive_specs(self, peer: int, key: TransferKey) -> list[TensorSpec]:
        while (peer, self.rank, key) not in self._mailbox:
            if self.failures:
                raise self.failures[0]
            sleep(0.0002)
        return super().receive_specs(peer, key)


def follow(rank: GenerationRank, transport: WaitingTransport) -> None:
    try:
        rank.follow()
    except Exception as error:
        transport.failures.append(error)


def run(ranks: list[GenerationRank]) -> Iterator[tuple[int, Chosen]]:
    """The choices of a ring, whose other ranks run in threads."""
    threads = [Thread(target=follow, args=(rank, rank._ring._transport)) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    yield from ranks[0].lead()
    for thread in threads:
        thread.join()


def ring(model: Model, partition: list[int], requests: list[Request]) -> list[GenerationRank]:
    """The ranks of a ring in this process, each with its own layers of the same weights."""
    tied = {f"{layer.name}.{own}" for layer in model.layers for own in layer.ties}
    weights = {name: tensor for name, tensor in model.materialize(3).state_dict().items() if name not in tied}
    mailbox: Mailbox = {}
    failures: list[Exception] = []
    decoder = DecoderModel(model)
    return [GenerationRank(StageDecoder(decoder, model.with_weights(weights, 0, layers=spec.layers), 16, spec.layers),
                           Ring(WaitingTransport(spec.index, mailbox, failures), len(partition)), requests)
            for spec in model.split(partition)]


def alone(model: Model, request: Request) -> list[Chosen]:
    return list(decode(StageDecoder(DecoderModel(model), model.materialize(3).eval(), 16), request))


@pytest.mark.parametrize("partition", [[2, 3], [1, 2, 1, 1]])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_request_gives_the_tokens_of_one_process(model: Model, partition: list[int]) -> None:
    ranks = ring(model, partition, REQUESTS)
    found: dict[int, list[Chosen]] = {}
    for number, chosen in run(ranks):
        found.setdefault(number, []).append(chosen)
    for number, request in enumerate(REQUESTS):
        assert found[number] == alone(model, request)
    for rank in ranks:
        rank._ring.finish()
    assert found[1] == found[6]


def test_the_next_request_begins_where_one_has_ended_and_all_are_in_flight() -> None:
    requests = [Request((1,), Decoding(tokens, 38)) for tokens in (1, 5, 2, 2, 3, 1)]
    order = [number for number, _ in run(ring(GPT, [3, 2], requests))]
    assert in_flight(2, 6) == 4
    assert order == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 5, 4, 1, 1]


def test_lost_weights_end_all_ranks() -> None:
    ranks = ring(GPT, [3, 2], REQUESTS[:1])
    with torch.no_grad():
        for _, _, module in ranks[1]._stage._layers:
            for parameter in module.parameters():
                parameter.fill_(torch.inf)
    with pytest.raises(UserError, match="not finite"):
        list(run(ranks))


def test_a_text_keeps_its_score_on_the_way() -> None:
    [(_, last)] = [(number, chosen) for number, chosen in run(ring(GPT, [3, 2], [REQUESTS[2]]))
                   if chosen.texts is not None]
    assert last.texts is not None
    assert [type(text) for text in last.texts] == [Text, Text]
    assert last.texts[0].score is not None
