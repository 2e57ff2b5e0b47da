"""Text from a model of next tokens: what is chosen, from which scores, and that caches do not change it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.app.families import transformer
from vpipe.app.families.bert import BertConfig, bert
from vpipe.app.families.experts import Mixture
from vpipe.app.families.gpt import GptConfig, GptEmbeddings, gpt
from vpipe.app.families.llama import LlamaConfig, llama
from vpipe.app.families.transformer import NextTokenHead
from vpipe.errors import UserError
from vpipe.extras.generation.decoding import BeamSearch, Chosen, Decoding, Request, Sampler, Text, chooser
from vpipe.extras.generation.masked_words import fill_masks
from vpipe.extras.generation.stage_decoder import DecoderModel, StageDecoder, decode
from vpipe.model.layer import Layer
from vpipe.model.model import Model

GPT = gpt(GptConfig(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3))
LLAMA = llama(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.3))

MIXTURE = llama(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                            max_position_embeddings=16, initializer_range=0.3, num_local_experts=3))


def weights_of(model: Model, seed: int) -> dict[str, Tensor]:
    tied = {f"{layer.name}.{own}" for layer in model.layers for own in layer.ties}
    return {name: tensor for name, tensor in model.materialize(seed).state_dict().items() if name not in tied}


def counts_of(scores: Sequence[float], number: int = 1500, **options: Any) -> Counter[int]:
    """How often each token is drawn when the scores are always these; ids from 3 on are no tokens."""
    sampler = Sampler(Decoding(number, 3, **options))
    return Counter(sampler.choose(torch.tensor([scores])).tokens[0] for _ in range(number))


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


def test_a_drawn_text_ends_with_its_end_or_its_last_token() -> None:
    sampler, scores = Sampler(Decoding(3, 4, end=2, temperature=0)), torch.eye(4)[None]
    assert [sampler.choose(scores[:, token]) for token in (1, 3)] == [Chosen([1], [0]), Chosen([3], [0])]
    assert sampler.choose(scores[:, 2]).texts == [Text((1, 3))]
    sampler = Sampler(Decoding(2, 4, end=2, temperature=0))
    assert [sampler.choose(scores[:, token]).texts for token in (1, 3)] == [None, [Text((1, 3))]]


def whole_forward(model: Model, modules: nn.ModuleDict, request: Request, window: int) -> list[Text]:
    """The texts by forwards of all layers over the last tokens of every row."""
    choose, rows = chooser(request.decoding).choose, [list(request.prompt)]
    while True:
        with torch.no_grad():
            tensors = {"input_ids": torch.tensor([row[-window:] for row in rows])}
            for layer in model.layers[:-1]:
                found = modules[layer.name](*(tensors[name] for name in layer.inputs))
                tensors.update(zip(layer.outputs, found if isinstance(found, tuple) else (found,), strict=True))
            chosen = choose(modules["head"].scores(tensors["h"])[:, -1])
        if chosen.texts is not None:
            return chosen.texts
        rows = [[*rows[parent], token] for parent, token in zip(chosen.parents, chosen.tokens, strict=True)]


DECODINGS = {"greedy": {"temperature": 0}, "drawn": {"seed": 3}, "nucleus": {"seed": 4, "top_p": 0.8, "top_k": 9},
             "beams": {"beams": 3, "best": 3, "end": 7}}


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTURE], ids=["gpt", "llama", "mixture"])
def test_caches_give_the_tokens_of_whole_forwards(model: Model, decoding: str) -> None:
    """Also of a prompt of one token, and of texts that outgrow the window."""
    modules, decoder = model.materialize(3).eval(), DecoderModel(model)
    assert decoder.cached
    for prompt, window, tokens in (([5], 16, 12), ([1, 2, 3, 4], 16, 12), ([1, 2, 3], 6, 9), ([9] * 9, 6, 4)):
        request = Request(tuple(prompt), Decoding(tokens, 38, **DECODINGS[decoding]))
        last = list(decode(StageDecoder(decoder, modules, window), request))[-1]
        expected = whole_forward(model, modules, request, window)
        assert last.texts is not None
        assert [text.tokens for text in last.texts] == [text.tokens for text in expected]
        assert [text.score or 0 for text in last.texts] == pytest.approx([text.score or 0 for text in expected])


def test_a_cache_computes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    forward = GptEmbeddings.forward
    monkeypatch.setattr(GptEmbeddings, "forward", lambda self, ids, positions=None, start=0: (
        seen.append([start, *ids.flatten().tolist()]), forward(self, ids, positions, start))[1])
    found = decode(StageDecoder(DecoderModel(GPT), GPT.materialize(0).eval(), 16), Request((4, 5), Decoding(3, 40)))
    tokens = [chosen.tokens[0] for chosen in found]
    assert seen == [[0, 4, 5], [2, tokens[0]], [3, tokens[1]]]


class Backwards(nn.Module):
    """A layer without ``step``: it mixes tokens in its own way."""

    def forward(self, h_bsh: Tensor) -> Tensor:
        return h_bsh + h_bsh.cumsum(1) / 9


def test_a_model_with_a_layer_without_step_computes_whole_forwards() -> None:
    model = Model([*GPT.layers[:2], Layer("own", Backwards), *GPT.layers[2:]], GPT.batch)
    decoder, modules = DecoderModel(model), model.materialize(3).eval()
    assert not decoder.cached
    request = Request((1, 2), Decoding(8, 40, seed=1))
    *_, last = decode(StageDecoder(decoder, modules, 16), request)
    assert last.texts == whole_forward(model, modules, request, 16)
    own = transformer.decoder(1, lambda: nn.Embedding(40, 16), Backwards, Backwards,
                              lambda: NextTokenHead(nn.Identity(), nn.Linear(16, 40)), tied=False, mixture=Mixture())
    assert not DecoderModel(own).cached


class Chain:
    """Log probabilities of the next token by the last one, of a tiny vocabulary in which 0 ends a text."""

    def __init__(self, words: int, seed: int) -> None:
        scores = 2 * torch.randn(words, words, words, generator=torch.Generator().manual_seed(seed))
        self.words, self.logs = words, scores.double().log_softmax(-1)

    def scores(self, row: Sequence[int]) -> Tensor:
        return self.logs[tuple([1, 1, *row][-2:])]

    def total(self, row: Sequence[int]) -> float:
        return sum(float(self.scores(row[:place])[token]) for place, token in enumerate(row))

    def searched(self, decoding: Decoding) -> tuple[list[Text], int]:
        """The texts of a beam search, and its steps."""
        beams, rows, steps = BeamSearch(decoding), [list[int]()], 0
        while True:
            chosen = beams.choose(torch.stack([self.scores(row) for row in rows]))
            steps += 1
            if chosen.texts is not None:
                return chosen.texts, steps
            rows = [[*rows[parent], token] for parent, token in zip(chosen.parents, chosen.tokens, strict=True)]

    def all_texts(self, length: int, alpha: float) -> list[Text]:
        """Every text of at most that many tokens, by its score, with the formula of Wu et al. written out."""
        found = []
        for number in range(1, length + 1):
            for row in product(range(self.words), repeat=number):
                if 0 in row[:-1] or (row[-1] != 0 and number < length):
                    continue
                score = self.total(row) / ((5 + number) ** alpha / (5 + 1) ** alpha)
                found.append(Text(row[:-1] if row[-1] == 0 else row, score))
        return sorted(found, key=lambda text: -(text.score or 0))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_what_a_search_of_all_texts_finds(seed: int, alpha: float) -> None:
    chain = Chain(4, seed)
    found, _ = chain.searched(Decoding(4, 4, end=0, beams=4 ** 4, length_penalty=alpha, best=9))
    expected = chain.all_texts(4, alpha)[:9]
    assert [text.tokens for text in found] == [text.tokens for text in expected]
    assert [text.score for text in found] == pytest.approx([text.score for text in expected])


def test_a_beam_of_one_is_greedy_and_a_wider_one_is_no_worse_here() -> None:
    for seed in range(5):
        chain = Chain(5, seed)
        row = list[int]()
        while len(row) < 6 and (not row or row[-1] != 0):
            row.append(int(chain.scores(row).argmax()))
        greedy, wide = (chain.searched(Decoding(6, 5, end=0, beams=beams, length_penalty=0))[0][0] for beams in (1, 4))
        assert greedy.score == pytest.approx(chain.total(row))
        assert list(greedy.tokens) == [token for token in row if token != 0]
        assert (wide.score or 0) >= (greedy.score or 0)


def test_a_beam_search_ends_when_no_beginning_can_become_better() -> None:
    certain = Chain(3, 0)
    certain.logs = torch.tensor([0.98, 0.01, 0.01]).double().log().expand(3, 3, 3)
    texts, steps = certain.searched(Decoding(50, 3, end=0, beams=1))
    assert (texts[0].tokens, steps) == ((), 1)
    assert certain.searched(Decoding(50, 3, end=0, beams=2))[1] < 10
    cut, steps = certain.searched(Decoding(5, 3, beams=2, best=2))  # nothing ends a text
    assert steps == 5
    assert [len(text.tokens) for text in cut] == [5, 5]


def test_weights_that_are_lost_are_named() -> None:
    for choose in (Sampler(Decoding(3, 2)).choose, BeamSearch(Decoding(3, 2, beams=2)).choose):
        for scores in ([0.0, math.nan], [math.inf, 0.0]):
            with pytest.raises(UserError, match=r"not finite numbers(?s:.*)--step"):
                choose(torch.tensor([scores]))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_weights_are_loaded_for_all_layers_or_some(model: Model) -> None:
    weights, whole = weights_of(model, 3), model.materialize(3).eval()
    loaded = {"all": model.with_weights(weights, 0), "drawn": model.with_weights(weights, 0, draw=True)}
    for modules in loaded.values():
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in modules.state_dict().items())
    last = model.with_weights(weights, 0, layers=range(3, 5))
    assert set(last) == {"block1.mlp", "head"}
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in last.state_dict().items())


def test_bert_gives_the_probabilities_of_masked_words_and_continues_nothing() -> None:
    model = bert(BertConfig.preset("tiny", vocab_size=40, hidden_size=16, max_position_embeddings=16))
    modules = model.with_weights(weights_of(model, 3), 0)
    found = fill_masks(model, modules, [2, 4, 9, 4, 3], [1, 3], 38)
    assert found.shape == (2, 38)
    assert torch.allclose(found.sum(1), torch.ones(2, dtype=found.dtype))
    assert not torch.equal(found[0], found[1])
    with pytest.raises(UserError, match="does not predict the next token"):
        DecoderModel(model)
    with pytest.raises(UserError, match="does not predict masked tokens"):
        fill_masks(GPT, GPT.with_weights(weights_of(GPT, 0), 0), [1], [0], 40)
