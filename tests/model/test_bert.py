"""BERT: sizes as published, layers that chain to the paper's formulas, ties, masks, and the words of its errors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from golden import assert_golden, refusal
from torch import Tensor, nn

from vpipe.app.families.bert import KEYS, BertConfig, bert, bert_from_settings, config_from_settings
from vpipe.app.families.registry import ModelSettings
from vpipe.errors import UserError
from vpipe.model.model import Model

SMALL = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
                   max_position_embeddings=16)


def preset_of(name: str, **overrides: Any) -> BertConfig:
    return BertConfig(**KEYS.merge(BertConfig, name, overrides, {}))


def batch_of(config: BertConfig, samples: int = 3, length: int = 11, predictions: int = 4) -> dict[str, Tensor]:
    """A random batch; every sample but the first ends in padding, and its last prediction is none."""
    generator = torch.Generator().manual_seed(7)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    mask = torch.ones(samples, length, dtype=torch.int64)
    mask[1:, -3:] = 0
    ids = integers(1, config.vocab_size, samples, predictions)
    ids[1:, -1] = 0
    return {"input_ids": integers(1, config.vocab_size, samples, length) * mask,
            "segment_ids": integers(0, config.type_vocab_size, samples, length), "input_mask": mask,
            "masked_lm_positions": integers(0, length - 3, samples, predictions), "masked_lm_ids": ids,
            "next_sentence_labels": integers(0, 2, samples)}


def chained(model: Model, modules: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss, from layers that know of each other by the names of their tensors only."""
    tensors = dict(batch)
    for layer in model.layers:
        inputs = [tensors[name] for name in layer.inputs]
        before = [tensor.clone() for tensor in inputs]
        tensors[layer.outputs[0]] = modules[layer.name](*inputs)
        assert all(map(torch.equal, inputs, before)), f"{layer.name} changed an input in place"
    return tensors["loss"]


def monolithic(weights: Mapping[str, Tensor], config: BertConfig, batch: Mapping[str, Tensor]) -> Tensor:
    """The same loss by the paper's formulas, from a state dict: softmax written out, one sample at a time."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = hidden // heads

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + config.layer_norm_eps).sqrt()
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    word_losses, sentence_losses = [], []
    for sample in range(len(batch["input_ids"])):
        ids, segments, mask = (batch[name][sample] for name in ("input_ids", "segment_ids", "input_mask"))
        table = "block0.attention.embeddings"
        h = norm(f"{table}.norm", weights[f"{table}.word.weight"][ids] + weights[f"{table}.segment.weight"][segments]
                 + weights[f"{table}.position.weight"][: len(ids)])
        for block in range(config.num_hidden_layers):
            name = f"block{block}.attention" + (".attention" if block == 0 else "")
            query, key, value = (linear(f"{name}.{part}", h) for part in ("query", "key", "value"))
            mixed = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = query[:, part] @ key[:, part].T / math.sqrt(size)
                scores = scores.masked_fill(mask == 0, -math.inf)
                mixed.append(scores.softmax(-1) @ value[:, part])
            h = norm(f"{name}.norm", linear(f"{name}.output", torch.cat(mixed, -1)) + h)
            name = f"block{block}.mlp"
            h = norm(f"{name}.norm", linear(f"{name}.contract", gelu(linear(f"{name}.expand", h))) + h)
        for position, word in zip(batch["masked_lm_positions"][sample], batch["masked_lm_ids"][sample], strict=True):
            if word != 0:
                transformed = norm("head.norm", gelu(linear("head.transform", h[position])))
                word_losses.append(-linear("head.decoder", transformed).log_softmax(-1)[word])
        classes = linear("head.next_sentence", torch.tanh(linear("head.pooler", h[0])))
        sentence_losses.append(-classes.log_softmax(-1)[batch["next_sentence_labels"][sample]])
    return torch.stack(word_losses).mean() + torch.stack(sentence_losses).mean()


def parameters(modules: nn.ModuleDict) -> int:
    return sum(parameter.numel() for parameter in modules.parameters())  # a shared one is counted once


@pytest.mark.parametrize(("preset", "layers", "count"), [
    ("tiny", 5, 4_433_468), ("mini", 9, 11_267_900), ("small", 9, 29_058_876), ("medium", 17, 41_668_412),
    ("base", 25, 110_106_428), ("large", 49, 336_226_108)])
def test_presets_have_the_published_sizes(preset: str, layers: int, count: int) -> None:
    config = preset_of(preset)
    model = bert(config)
    assert len(model) == layers
    with torch.device("meta"):
        assert parameters(model.materialize()) == count
    n, h, v = config.num_hidden_layers, config.hidden_size, config.vocab_size
    block = 4 * (h * h + h) + (8 * h * h + 5 * h) + 4 * h
    assert count == (v + 512 + 2) * h + 2 * h + n * block + 2 * (h * h + h) + 2 * h + v + (2 * h + 2)


def test_layers_can_be_sent_to_another_process() -> None:
    model = bert(SMALL)
    sent = pickle.loads(pickle.dumps(model.layers))  # as spawned ranks get their layers
    weights = [layer.materialize(3, seed=0).state_dict() for layer in (model.layers[3], sent[3])]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("tied", [True, False])
def test_chained_layers_compute_the_papers_formulas(tied: bool) -> None:
    config = BertConfig(**{**vars(SMALL), "tie_word_embeddings": tied, "initializer_range": 0.3})
    model = bert(config)
    modules = model.materialize(seed=1).double().eval()
    weights = modules.state_dict()
    expected = monolithic(weights, config, batch_of(config))
    # fp64 on both sides; what is left is another order of sums over at most 50 numbers.
    torch.testing.assert_close(chained(model, modules, batch_of(config)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("hopeless", ["no predictions", "padding only"])
def test_loss_and_gradients_stay_finite(hopeless: str) -> None:
    model = bert(SMALL)
    modules = model.materialize().train()
    batch = batch_of(SMALL)
    batch["masked_lm_ids"] = torch.zeros_like(batch["masked_lm_ids"])
    if hopeless == "padding only":
        batch["input_mask"] = torch.zeros_like(batch["input_mask"])
    loss = chained(model, modules, batch)
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in modules.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_each_dropout_acts_by_itself(name: str) -> None:
    none = {**vars(SMALL), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def loss(config: BertConfig) -> float:
        model = bert(config)
        return chained(model, model.materialize().train(), batch_of(config)).item()

    assert loss(BertConfig(**{**none, name: 0.5})) != loss(BertConfig(**none))


def test_initialisation_is_berts_and_depends_on_the_seed_alone() -> None:
    model = bert(preset_of("tiny"))
    torch.manual_seed(0)
    weights = model.materialize(seed=3).state_dict()
    torch.manual_seed(99)
    again = model.materialize(seed=3).state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, again[name]), name
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        elif weight.numel() > 10_000:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
    assert not weights["block0.attention.embeddings.word.weight"][0].any(), "the padding word starts at 0"


def test_sequence_too_long_says_both_numbers() -> None:
    model = bert(SMALL)
    modules = model.materialize()
    with pytest.raises(UserError) as error:
        chained(model, modules, batch_of(SMALL, length=17))
    expected = ("error: the sequence length is 17, but BERT has position embeddings for 16 tokens\n"
                "hint: shorten the sequences to 16, or raise max_position_embeddings to 17")
    assert str(error.value) == expected
    with pytest.raises(UserError, match="sequence length is 513, but BERT has position embeddings for 512"):
        bert_from_settings(ModelSettings(vocab_size=50, preset="tiny", sequence_length=513))


MISTAKES: list[dict[str, object]] = [
    {"hidden_size": 256, "num_attention_heads": 12}, {"vocab_size": -1}, {"hidden_dropout_prob": 1.0},
    {"tie_word_embeddings": "no"}, {"hidden_sise": 3}]


def test_config_mistakes() -> None:
    assert_golden(__file__, "mistakes", [refusal(preset_of, "mini", **wrong) for wrong in MISTAKES])


def test_all_mistakes_at_once_and_unknown_preset() -> None:
    with pytest.raises(UserError) as error:
        preset_of("mini", hidden_size=None, num_attention_heads=0)
    assert [problem.what for problem in error.value.problems] == ["BERT's hidden_size is None",
                                                                  "BERT's num_attention_heads is 0"]
    with pytest.raises(UserError, match=r"BERT has no preset 'lage'\nhint: did you mean 'large'\?"):
        preset_of("lage")


def sizes(model: Model) -> tuple[int, int]:
    """Layers, parameters."""
    with torch.device("meta"):
        return len(model), parameters(model.materialize())


def test_settings_take_a_preset_then_overrides_then_their_own_keys() -> None:
    assert sizes(bert_from_settings(ModelSettings(vocab_size=30522))) == (49, 336_226_108)
    overrides = {"hidden_size": 128, "num_hidden_layers": 9, "num_attention_heads": 2, "vocab_size": 7}
    settings = ModelSettings(vocab_size=30522, num_layers=2, overrides=overrides, tie_weights=False)
    assert sizes(bert_from_settings(settings)) == (5, 4_433_468 + 30522 * 128)
    settings = ModelSettings(vocab_size=30522, preset="tiny", hidden_size=256, num_layers=4, num_heads=4)
    assert sizes(bert_from_settings(settings)) == (9, 11_267_900)


def test_settings_dropout_replaces_both() -> None:
    model = bert_from_settings(ModelSettings(vocab_size=50, preset="tiny", dropout=0.0))
    modules = model.materialize().train()
    batch = batch_of(SMALL)
    assert chained(model, modules, batch).item() == chained(model, modules.eval(), batch).item()


def test_hugging_face_keys_are_taken_when_they_agree() -> None:
    published = {"architectures": ["BertForMaskedLM"], "hidden_act": "gelu", "position_embedding_type": "absolute",
                 "pad_token_id": 0, "model_type": "bert", "transformers_version": "4.6.0", "use_cache": True}
    sizes(bert_from_settings(ModelSettings(vocab_size=50, preset="tiny", overrides=published)))
    assert refusal(bert_from_settings, ModelSettings(vocab_size=50, overrides={"hidden_act": "relu"})) == (
        "error: 'hidden_act' is 'relu', but this BERT computes 'gelu' only\n"
        "hint: set 'hidden_act' to 'gelu' or leave it out")
    with pytest.raises(UserError, match="did you mean 'intermediate_size'"):
        bert_from_settings(ModelSettings(vocab_size=50, overrides={"intermediat_size": 3}))


def test_a_size_that_is_null_is_refused() -> None:
    with pytest.raises(UserError, match="BERT's intermediate_size is None"):
        config_from_settings(ModelSettings(50, overrides={"hidden_size": 64, "intermediate_size": None}))
