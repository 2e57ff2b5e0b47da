"""BERT there and back: the same logits in ``transformers``, bit for bit, and the same weights back again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vpipe.checkpoint.export import export_huggingface
from vpipe.checkpoint.huggingface import find_model, imported
from vpipe.data.wordpiece import train_wordpiece
from vpipe.model.bert import Head, bert_from_settings
from vpipe.model.layer import Model
from vpipe.model.registry import HuggingFace, ModelSettings, family_named

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40,
         "max_position_embeddings": 16, "type_vocab_size": 3, "layer_norm_eps": 1e-7}


def names_of_bert() -> HuggingFace:
    found = family_named("bert").huggingface
    assert found is not None
    return found


def weights_of(model: Model, modules: nn.ModuleDict) -> dict[str, Tensor]:
    """As a checkpoint has them: tied ones under their owner's name."""
    tied = {f"{layer.name}.{own}" for layer in model.layers for own in layer.ties}
    return {name: tensor for name, tensor in modules.state_dict().items() if name not in tied}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(4, 11, dtype=torch.int64)
    mask[1:, -3:] = 0
    return {"input_ids": torch.randint(1, 50, (4, 11), generator=generator) * mask,
            "segment_ids": torch.randint(0, 3, (4, 11), generator=generator), "input_mask": mask,
            "masked_lm_positions": torch.arange(11).expand(4, 11), "masked_lm_ids": torch.ones(4, 11).long(),
            "next_sentence_labels": torch.zeros(4).long()}


@torch.no_grad()
def our_logits(model: Model, modules: nn.ModuleDict, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of every word [B, S, V], and of the next sentence [B, 2]."""
    tensors = dict(fields)
    for layer in model.layers[:-1]:
        tensors["h"] = modules[layer.name](*(tensors[name] for name in layer.inputs))
    head = modules["head"]
    assert isinstance(head, Head)
    return head.scores(tensors["h"], tensors["masked_lm_positions"])


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers shows bars; what it logs as a warning is looked at."""
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("tied", [True, False])
def test_exported_bert_gives_the_same_logits(tied: bool, tmp_path: Path) -> None:
    settings = ModelSettings(50, tie_weights=tied, overrides=SIZES)
    model = bert_from_settings(settings)
    torch.manual_seed(1)
    modules = model.materialize().eval()
    for parameter in modules.parameters():  # norms and biases, too, so that a swap of two is seen
        nn.init.normal_(parameter, std=0.3)
    tokenizer = train_wordpiece([["the quick brown fox", "jumps over a dog"]], 60)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    export_huggingface(weights_of(model, modules), names_of_bert(), settings, tmp_path / "out",
                       tmp_path / "tokenizer.json" if tied else None)

    theirs, report = transformers.BertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    fields = batch()
    with torch.no_grad():
        found = theirs.eval()(fields["input_ids"], fields["input_mask"], fields["segment_ids"])
    words, sentence = our_logits(model, modules, fields)
    assert torch.equal(found.prediction_logits, words)
    assert torch.equal(found.seq_relationship_logits, sentence)
    if tied:
        read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("The fox: a dog", "jumps").input_ids
        cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
        assert read == [cls, *tokenizer.encode("The fox: a dog").ids, sep, *tokenizer.encode("jumps").ids, sep]
    assert (theirs.config.hidden_dropout_prob, theirs.config.tie_word_embeddings) == (0.1, tied)


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saved_comes_back(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(2)
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(vocab_size=50, tie_word_embeddings=tied, **SIZES)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "several files, as large models come in"

    found = find_model(tmp_path)
    assert (found.family, found.settings.tie_weights) == ("bert", tied)
    model = bert_from_settings(found.settings)
    weights = imported(tmp_path, names_of_bert(), found.settings, say=pytest.fail)
    modules = model.materialize().eval()
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights_of(model, modules).items()}
    modules.load_state_dict(weights, strict=False)
    fields = batch()
    with torch.no_grad():
        expected = theirs(fields["input_ids"], fields["input_mask"], fields["segment_ids"])
    words, sentence = our_logits(model, modules, fields)
    assert torch.equal(expected.prediction_logits, words)
    assert torch.equal(expected.seq_relationship_logits, sentence)
