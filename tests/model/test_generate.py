"""Text from a model of next tokens: what is chosen, and from which scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.model.bert import BertConfig, bert
from vpipe.model.generate import WholeForward, fill_masks, generate, load_weights
from vpipe.model.gpt import GptConfig, gpt
from vpipe.model.layer import Model
from vpipe.model.llama import LlamaConfig, llama

GPT = gpt(GptConfig(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2))
LLAMA = llama(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                          max_position_embeddings=16))


class Fixed:
    """The same scores for every text; it keeps what is appended."""

    def __init__(self, *scores: float) -> None:
        self.scores, self.appended = torch.tensor(scores), list[list[int]]()

    def append(self, ids: Sequence[int]) -> Tensor:
        self.appended.append(list(ids))
        return self.scores


def weights_of(model: Model, seed: int) -> dict[str, Tensor]:
    tied = {f"{layer.name}.{own}" for layer in model.layers for own in layer.ties}
    return {name: tensor for name, tensor in model.materialize(seed).state_dict().items() if name not in tied}


def test_each_token_is_appended_once_so_that_a_cache_needs_no_more() -> None:
    scores = Fixed(0.0, 3.0, 1.0, 9.0)
    assert list(islice(generate(scores, [7, 8], 3, temperature=0), 3)) == [1, 1, 1]  # 3 is no token
    assert scores.appended == [[7, 8], [1], [1]]


def test_a_seed_decides_and_tokens_come_as_often_as_their_probability_says() -> None:
    scores = torch.tensor([0.5, 0.3, 0.2]).log().tolist()

    def counts(seed: int, **options: float) -> Counter[int]:
        return Counter(islice(generate(Fixed(*scores), [0], 3, seed=seed, **options), 1500))  # type: ignore[arg-type]

    assert counts(1) == counts(1) != counts(2)
    assert [counts(1)[token] / 1500 for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    assert [counts(1, top_k=2)[token] / 1500 for token in range(3)] == pytest.approx([0.625, 0.375, 0], abs=0.04)
    assert [counts(1, temperature=0.5)[token] / 1500 for token in range(3)] == pytest.approx(
        [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], abs=0.04)
    assert counts(1, temperature=1e-300) == counts(1, top_k=1) == counts(1, temperature=0) == {0: 1500}


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_scores_are_those_of_the_whole_model_for_its_last_tokens(model: Model) -> None:
    weights = weights_of(model, 3)
    modules = load_weights(model, weights, 0)
    whole = model.materialize(3).eval()
    drawn = load_weights(model, weights, 0, draw=True)
    ids = torch.randint(40, (1, 20), generator=torch.Generator().manual_seed(0))
    found = WholeForward(model, modules, 16)
    found.append(ids[0, :5].tolist())
    last = found.append(ids[0, 5:].tolist())
    for same in (whole, drawn):
        h_bsh = ids[:, 4:]
        for layer in model.layers[:-1]:
            h_bsh = same[layer.name](h_bsh)
        assert torch.allclose(last, same["head"].scores(h_bsh)[0, -1], atol=1e-6)


def test_weights_that_are_lost_are_named() -> None:
    for scores in (Fixed(0.0, float("nan")), Fixed(float("inf"), 0.0)):
        with pytest.raises(UserError, match=r"not finite numbers(?s:.*)--step"):
            next(generate(scores, [0], 2))


def test_bert_gives_the_probabilities_of_masked_words_and_continues_nothing() -> None:
    model = bert(BertConfig.preset("tiny", vocab_size=40, hidden_size=16, max_position_embeddings=16))
    modules = load_weights(model, weights_of(model, 3), 0)
    found = fill_masks(model, modules, [2, 4, 9, 4, 3], [1, 3], 38)
    assert found.shape == (2, 38)
    assert torch.allclose(found.sum(1), torch.ones(2, dtype=found.dtype))
    assert not torch.equal(found[0], found[1])
    with pytest.raises(UserError, match="does not predict the next token"):
        WholeForward(model, modules, 16)
    with pytest.raises(UserError, match="does not predict masked tokens"):
        fill_masks(GPT, load_weights(GPT, weights_of(GPT, 0), 0), [1], [0], 40)
