"""The translation model: published sizes, torch's own Transformer, masks, ties, smoothing, the words of its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.synthetic import synthetic
from vpipe.app.families.loss import NO_LABEL
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.errors import UserError
from vpipe.extras.translation.model import (
    TranslationOptions,
    from_huggingface,
    huggingface_config,
    sinusoids,
    translation_from_settings,
)
from vpipe.model.layer import Layer
from vpipe.model.model import Model

SIZES: dict[str, Any] = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
                         "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
WORDS = 50


def settings_of(pre_norm: bool = False, smoothing: float = 0.0, tied: bool | None = None,
                **overrides: Any) -> ModelSettings:
    return ModelSettings(WORDS, dropout=0.0, tie_weights=tied, overrides=SIZES | overrides,
                         options=TranslationOptions(smoothing, pre_norm))


def batch_of() -> dict[str, Tensor]:
    """Three pairs; the second is padded on both sides."""
    generator = torch.Generator().manual_seed(7)
    source, target = (torch.randint(2, WORDS, (3, length), generator=generator) for length in (7, 5))
    mask, labels = torch.ones_like(source), target.clone()
    mask[1, 4:], labels[1, 3:] = 0, NO_LABEL
    start = torch.zeros(3, 1, dtype=torch.int64)
    return {"source_ids": source * mask, "source_mask": mask, "labels": labels,
            "target_ids": torch.cat((start, target[:, :-1]), 1)}


def below_head(model: Model, modules: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Tensor:
    """From layers that know of each other by the names of their tensors only."""
    tensors = dict(batch)
    for layer in model.layers[:-1]:
        tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
    return tensors["h"]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("pre_norm", [False, True])
def test_chained_layers_compute_torchs_transformer(pre_norm: bool) -> None:
    model, batch = translation_from_settings(settings_of(pre_norm)), batch_of()
    modules = model.materialize(1).double().eval()
    for name, parameter in modules.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    state = modules.state_dict()
    plain = nn.Transformer(24, 3, 2, 2, 40, 0.0, F.relu, batch_first=True, norm_first=pre_norm).double().eval()
    theirs = {}
    for side in ("encoder", "decoder"):
        for block in range(2):
            at, first = f"{side}.layers.{block}", f"{side}{block}.attention" + ".attention" * (block == 0)
            attentions = {"self_attn": first} | ({"multihead_attn": f"{side}{block}.cross_attention"}
                                                 if side == "decoder" else {})
            norms = [*attentions.values(), f"{side}{block}.mlp"]
            for leaf in ("weight", "bias"):
                for their, own in attentions.items():
                    theirs[f"{at}.{their}.in_proj_{leaf}"] = torch.cat([
                        state[f"{own}.{part}.{leaf}"] for part in ("query", "key", "value")])
                    theirs[f"{at}.{their}.out_proj.{leaf}"] = state[f"{own}.output.{leaf}"]
                theirs[f"{at}.linear1.{leaf}"] = state[f"{side}{block}.mlp.expand.{leaf}"]
                theirs[f"{at}.linear2.{leaf}"] = state[f"{side}{block}.mlp.contract.{leaf}"]
                theirs |= {f"{at}.norm{number}.{leaf}": state[f"{own}.norm.{leaf}"]
                           for number, own in enumerate(norms, 1)}
        if pre_norm:
            own = "encoder1.mlp.final_norm" if side == "encoder" else "head.norm"
            theirs |= {f"{side}.norm.{leaf}": state[f"{own}.{leaf}"] for leaf in ("weight", "bias")}
        else:
            getattr(plain, side).norm = None
    plain.load_state_dict(theirs)
    words = state["encoder0.attention.embeddings.token.weight"] * 24 ** 0.5
    source, target = (words[batch[f"{side}_ids"]] + sinusoids(batch[f"{side}_ids"].shape[1], 24).double()
                      for side in ("source", "target"))
    unseen = batch["source_mask"] == 0
    expected = plain(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
                     tgt_is_causal=True, src_key_padding_mask=unseen, memory_key_padding_mask=unseen)
    found = modules["head"].norm(below_head(model, modules, batch))
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(modules["head"].scores(below_head(model, modules, batch)),
                          expected @ state["encoder0.attention.embeddings.token.weight"].T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("preset", "layers", "count"), [(None, 31, 63_082_496), ("base", 31, 63_082_496),
                                                         ("big", 31, 214_245_376)])
def test_presets_have_the_published_sizes(preset: str | None, layers: int, count: int) -> None:
    """65 and 213 million in table 3, with a vocabulary of about 37,000 tokens and other biases."""
    found, settings = family_named("translation"), ModelSettings(37000, preset, sequence_length=128)
    counts = found.factory(settings).parameter_counts()
    assert (len(counts), sum(counts)) == (layers, count)
    assert found.flops is not None
    flops, hidden = found.flops(settings), 1024 if preset == "big" else 512
    assert len(flops) == layers
    assert flops[1] == 2 * counts[1], "an MLP uses each of its weights once"
    assert flops[2] == flops[13] == 2 * counts[2] + 4 * hidden * 128
    assert flops[-1] == 2 * 37000 * hidden


def test_positions_are_sines_then_cosines() -> None:
    table = sinusoids(5, 6)
    for position in range(5):
        for pair in range(3):
            angle = torch.tensor(position / 10000 ** (2 * pair / 6), dtype=torch.float64)
            assert table[position, pair] == angle.sin().float()
            assert table[position, 3 + pair] == angle.cos().float()


def test_layers_and_what_crosses_each_cut() -> None:
    model = translation_from_settings(settings_of())
    assert [layer.name for layer in model.layers] == [
        "encoder0.attention", "encoder0.mlp", "encoder1.attention", "encoder1.mlp", "decoder0.attention",
        "decoder0.cross_attention", "decoder0.mlp", "decoder1.attention", "decoder1.cross_attention", "decoder1.mlp",
        "head"]
    assert [model.crossing(cut) for cut in range(1, 11)] == [
        *[("h",)] * 3, ("memory",), *[("h", "memory")] * 4, ("h",), ("h",)]
    assert [spec.fields for spec in model.split([4, 3, 4])] == [
        ("source_ids", "source_mask"), ("source_mask", "target_ids"), ("source_mask", "labels")]


def test_labels_are_smoothed_in_training_alone() -> None:
    model, batch = translation_from_settings(settings_of(smoothing=0.1)), batch_of()
    head, labels = model.materialize(2)["head"], batch["labels"]
    h = torch.randn(3, 5, 24)
    logits = head.scores(h).flatten(0, 1)
    assert torch.allclose(head(h, labels), F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1))
    assert torch.allclose(head.eval()(h, labels), F.cross_entropy(logits, labels.flatten()))
    assert head.train()(h, torch.full_like(labels, NO_LABEL)) == 0


@pytest.mark.parametrize(("overrides", "tied", "owners"), [
    ({}, None, [0, 0]), ({}, True, [0, 0]), ({}, False, []),
    ({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30}, None, [4]),
    ({"tie_word_embeddings": False}, None, [0])])
def test_embeddings_and_head_are_tied(overrides: dict[str, Any], tied: bool | None, owners: list[int]) -> None:
    model = translation_from_settings(settings_of(tied=tied, **overrides))
    modules = model.materialize()
    weights = [modules["encoder0.attention"].get_parameter("embeddings.token.weight"),
               modules["decoder0.attention"].get_parameter("embeddings.token.weight"),
               modules["head"].get_parameter("decoder.weight")]
    assert len({id(weight) for weight in weights}) == 3 - len(owners)
    assert weights[-1].shape[0] == overrides.get("decoder_vocab_size", WORDS)
    assert sum(len(layer.ties) for layer in model.layers) == len(owners)


@pytest.mark.parametrize(("overrides", "words"), [
    ({"hidden_size": 32}, "'hidden_size' is 32, but 'd_model' is 24"),
    ({"encoder_layerdrop": 0.1}, "'encoder_layerdrop' is 0.1, but this translation computes 0.0 only"),
    ({"normalize_before": True}, "'normalize_before' is True"), ({"decoder_attention_heads": 5}, "not divisible"),
    ({"activation_function": "tanh"}, "choose one of relu, gelu, swish, silu"),
    ({"eos_token_id": -1}, "it must be an integer from 0 on"), ({"d_modell": 8}, "did you mean 'd_model'"),
    ({"decoder_vocab_size": 9}, "both share one table")])
def test_unsupported_values_of_a_config_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        translation_from_settings(settings_of(**overrides))


def test_a_model_whose_translations_start_otherwise_is_refused() -> None:
    found = {"vocab_size": 50, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 0}
    assert from_huggingface(found).vocab_size == 50
    with pytest.raises(UserError, match="decoder_start_token_id is 7 and pad_token_id 0, but vpipe starts"):
        from_huggingface({**found, "decoder_start_token_id": 7})


@pytest.mark.parametrize(("settings", "words"), [
    (settings_of(pre_norm=True), "pre_norm"),
    (settings_of(tie_word_embeddings=False), "versions of Marian read differently")])
def test_models_that_marian_cannot_compute_are_not_exported(settings: ModelSettings, words: str) -> None:
    with pytest.raises(UserError, match=words):
        huggingface_config(settings)


def test_labels_of_a_model_are_a_field_of_its_last_layer() -> None:
    with pytest.raises(UserError, match="the labels of the model are 'y', which is no field"):
        Model([Layer("head", nn.Identity, ("x",), ("loss",))], batch=("x",), labels="y")


def test_synthetic_pairs_have_the_lengths_of_their_batch() -> None:
    fields = ("source_ids", "source_mask", "target_ids", "labels")
    data = synthetic(DatasetSettings(fields=fields, sequence_length=12, vocab_size=30, samples=32, batch_size=4))
    lengths = set()
    for whole, hidden in zip(data.batches("train", 4, seed=3), data.batches("train", 4, seed=3, fields=("labels",)),
                             strict=True):
        assert {name: t.shape for name, t in whole.items()} == {name: t.shape for name, t in hidden.items()}
        assert [name for name in fields if not hidden[name].is_meta] == ["labels"]
        source, mask, target, labels = (whole[name] for name in fields)
        assert torch.equal(source != 0, mask == 1)
        assert mask.sum(1).max() == mask.shape[1]
        assert torch.equal(target[:, 1:][labels[:, 1:] != NO_LABEL], labels[:, :-1][labels[:, 1:] != NO_LABEL])
        assert not target[:, 0].any()
        assert all(row[row != NO_LABEL][-1] == 1 for row in labels)
        lengths.add((source.shape[1], target.shape[1]))
    assert len(lengths) > 1
