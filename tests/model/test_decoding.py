"""Text from a model of next tokens: what is chosen, from which scores, and that caches do not change it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.app.families import transformer
from vpipe.app.families.bert import BertConfig, bert
from vpipe.app.families.decoding import Decoding, TextDecoder
from vpipe.app.families.experts import Mixture
from vpipe.app.families.gpt import GptConfig, GptEmbeddings, gpt
from vpipe.app.families.llama import LlamaConfig, llama
from vpipe.app.families.transformer import NextTokenHead
from vpipe.errors import UserError
from vpipe.model.layer import Layer
from vpipe.model.model import Model

GPT = gpt(GptConfig(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3))
LLAMA = llama(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.3))

MIXTURE = llama(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                            max_position_embeddings=16, initializer_range=0.3, num_local_experts=3))


class ScoresByLast(nn.Module):
    """A head whose scores depend on the last token alone: row t of a table is those after token t."""

    def __init__(self, table: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.table = torch.tensor(table)

    def scores(self, ids_bs: Tensor) -> Tensor:
        return self.table[ids_bs]


def decoder_of(table: Sequence[Sequence[float]]) -> TextDecoder:
    """What a model decodes whose scores are a table."""
    model = Model([Layer("first", nn.Identity, inputs=("input_ids",)),
                   Layer("head", lambda: ScoresByLast(table), inputs=("h", "labels"), outputs=("loss",))],
                  ("input_ids", "labels"))
    return TextDecoder(model, model.materialize(0), 16)


def counts_of(scores: Sequence[float], number: int = 1500, **options: Any) -> Counter[int]:
    """How often each token is drawn when the scores are always these; ids from 3 on are no tokens."""
    [token_b] = decoder_of([scores]).tokens(torch.zeros(number, 1, dtype=torch.long), Decoding(1, 3, **options))
    return Counter(token_b.tolist())


def test_a_seed_decides_and_tokens_come_as_often_as_their_probability_says() -> None:
    scores = [*torch.tensor([0.5, 0.3, 0.2]).log().tolist(), 9.0]

    def shares(**options: Any) -> list[float]:
        counts = counts_of(scores, **options)
        return [counts[token] / 1500 for token in range(3)]

    assert counts_of(scores, 60, seed=1) == counts_of(scores, 60, seed=1) != counts_of(scores, 60, seed=2)
    assert shares() == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0], abs=0.04)
    assert shares(temperature=0.5) == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], abs=0.04)
    assert shares(barred=0) == pytest.approx([0, 0.6, 0.4], abs=0.04)
    for certain in ({"temperature": 1e-300}, {"top_k": 1}, {"temperature": 0}):
        assert counts_of(scores, 60, **certain) == {0: 60}


def test_top_p_draws_from_the_fewest_tokens_with_that_share() -> None:
    scores = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    for top_p, tokens in ((0.01, {1}), (0.49, {1}), (0.51, {1, 2}), (0.79, {1, 2}), (0.81, {0, 1, 2}),
                          (1.0, {0, 1, 2})):
        assert set(counts_of(scores, 60, top_p=top_p)) == tokens
    assert counts_of(scores, top_p=0.7)[1] / 1500 == pytest.approx(0.625, abs=0.04)
    # The temperature and top_k come first: half the temperature gives 0.25, 0.09 and 0.04 of 0.38.
    assert set(counts_of(scores, 60, top_p=0.6, temperature=0.5)) == {1}
    assert set(counts_of(scores, 60, top_p=0.6, top_k=2)) == {1}


def test_a_text_ends_with_its_end_or_its_last_token() -> None:
    next_one = torch.eye(4).roll(1, 1).tolist()  # 0, 1, 2, 3, 0, ...
    prompts = torch.tensor([[0], [1], [2]])
    decoder = decoder_of(next_one)
    assert decoder.texts(prompts, Decoding(9, 4, end=3, temperature=0)) == [[1, 2], [2], []]
    assert decoder.passes == 3
    assert decoder.texts(prompts, Decoding(2, 4, end=3, temperature=0)) == [[1, 2], [2], []]
    assert decoder.texts(prompts, Decoding(2, 4, temperature=0)) == [[1, 2], [2, 3], [3, 0]]


def test_weights_that_are_lost_are_named() -> None:
    for scores in ([0.0, math.nan], [math.inf, 0.0]):
        with pytest.raises(UserError, match=r"not finite numbers(?s:.*)--step"):
            counts_of(scores, 1)


class Forwards(TextDecoder):
    """By forwards of all layers over the last tokens, without caches."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.cached
        self.cached = False


DECODINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "drawn": {"seed": 3},
                                        "nucleus": {"seed": 4, "top_p": 0.8, "top_k": 9}}


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTURE], ids=["gpt", "llama", "mixture"])
def test_caches_give_the_tokens_of_whole_forwards(model: Model, decoding: str) -> None:
    """Also of a prompt of one token, of several texts, and of texts that outgrow the window."""
    modules = model.materialize(3).eval()
    for prompts, window, tokens in (([[5]], 16, 12), ([[1, 2, 3, 4]], 16, 12), ([[1, 2, 3]], 6, 9), ([[9] * 9], 6, 4),
                                    ([[1, 2], [3, 4], [5, 6]], 16, 9)):
        choice = Decoding(tokens, 38, **DECODINGS[decoding])
        found, expected = (kind(model, modules, window).texts(torch.tensor(prompts), choice)
                           for kind in (TextDecoder, Forwards))
        assert found == expected
        assert len({*map(tuple, found)}) == len(prompts)


def test_whole_forwards_give_the_most_probable_token_of_the_model() -> None:
    modules, row = GPT.materialize(3).eval(), [1, 2, 3]
    [found] = Forwards(GPT, modules, 16).texts(torch.tensor([row]), Decoding(6, 38, temperature=0))
    for token in found:
        tensors = {"input_ids": torch.tensor([row])}
        for layer in GPT.layers[:-1]:
            tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
        assert token == modules["head"].scores(tensors["h"])[0, -1, :38].argmax()
        row.append(token)


def test_a_cache_computes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    forward = GptEmbeddings.forward
    monkeypatch.setattr(GptEmbeddings, "forward", lambda self, ids, positions=None, start=0: (
        seen.append([start, *ids.flatten().tolist()]), forward(self, ids, positions, start))[1])
    found = [*TextDecoder(GPT, GPT.materialize(0).eval(), 16).tokens(torch.tensor([[4, 5]]), Decoding(3, 40))]
    assert seen == [[0, 4, 5], [2, int(found[0])], [3, int(found[1])]]


class Backwards(nn.Module):
    """A layer without ``step``: it mixes tokens in its own way."""

    def forward(self, h_bsh: Tensor) -> Tensor:
        return h_bsh + h_bsh.cumsum(1) / 9


def test_a_model_with_a_layer_without_step_computes_whole_forwards() -> None:
    model = Model([*GPT.layers[:2], Layer("own", Backwards), *GPT.layers[2:]], GPT.batch)
    decoder = TextDecoder(model, model.materialize(3).eval(), 16)
    assert not decoder.cached
    prompt, greedy = torch.tensor([[1, 2]]), {"temperature": 0}
    [whole] = decoder.texts(prompt, Decoding(8, 40, **greedy))
    grown = torch.tensor([[1, 2, *whole[:-1]]])
    assert decoder.texts(grown, Decoding(1, 40, **greedy)) == [whole[-1:]]
    own = transformer.decoder(1, lambda: nn.Embedding(40, 16), Backwards, Backwards,
                              lambda: NextTokenHead(nn.Identity(), nn.Linear(16, 40)), tied=False, mixture=Mixture())
    assert not TextDecoder(own, own.materialize(0), 16).cached


def test_a_model_of_masked_words_continues_nothing() -> None:
    model = bert(BertConfig(40, 16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16))
    with pytest.raises(UserError, match="does not predict the next token"):
        TextDecoder(model, model.materialize(0), 16)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_weights_are_loaded_for_all_layers_or_some(model: Model) -> None:
    tied = {f"{layer.name}.{own}" for layer in model.layers for own in layer.ties}
    whole = model.materialize(3).eval()
    weights = {name: tensor for name, tensor in whole.state_dict().items() if name not in tied}
    loaded = {"all": model.with_weights(weights, 0), "drawn": model.with_weights(weights, 0, draw=True)}
    for modules in loaded.values():
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in modules.state_dict().items())
    last = model.with_weights(weights, 0, layers=range(3, 5))
    assert set(last) == {"block1.mlp", "head"}
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in last.state_dict().items())
