"""The translation model there and back: the same logits in ``transformers``, bit for bit, and the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft_models import check_files
from transformers_models import check_command, check_export, check_import, names_of, quiet_transformers, weights_of

from vpipe.app.data.tokenizers import train_byte_bpe
from vpipe.app.families.decoding import Decoding, TextDecoder
from vpipe.app.families.lora import LoraSettings
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.weights.export import export_huggingface

MARIAN: dict[str, Any] = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
          "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 56, "max_position_embeddings": 16,
          "activation_function": "swish", "scale_embedding": True, "pad_token_id": 49, "decoder_start_token_id": 49,
          "eos_token_id": 0, "decoder_vocab_size": 50}


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_gives_the_same_logits(tied: bool, tmp_path: Path) -> None:
    assert check_export("translation", MARIAN, tied, tmp_path / "out").config.eos_token_id == 0


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoints_of_transformers_are_read_back(tied: bool, tmp_path: Path) -> None:
    check_import("translation", {**MARIAN, "share_encoder_decoder_embeddings": tied}, tied, tmp_path)


def test_files_of_adapters(tmp_path: Path) -> None:
    check_files("translation", MARIAN, LoraSettings(4, 8.0, ("query", "value", "contract")), tmp_path)


def test_the_command_takes_the_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_command("translation", MARIAN)


def test_a_translation_model_goes_with_its_tokenizer(tmp_path: Path) -> None:
    transformers = quiet_transformers()
    tokenizer = train_byte_bpe(["the quick brown fox"], 300, special=("</s>", "<pad>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = ModelSettings(300, "tiny", hidden_size=16, num_heads=2)
    model = family_named("translation").factory(settings)
    modules = model.materialize(3).eval()
    export_huggingface(weights_of(model, modules), names_of("translation"), settings, tmp_path / "out",
                       tmp_path / "tokenizer.json")
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path / "out").eval()
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    sources = read(["the fox", "brown"], padding=True, return_tensors="pt")
    assert sources.input_ids[0].tolist() == [*tokenizer.encode("the fox").ids, 0]
    assert sources.input_ids[1, -1] == 1
    found = theirs.generate(sources.input_ids, attention_mask=sources.attention_mask, num_beams=1, max_new_tokens=6)
    mine = TextDecoder(model, modules, 6).texts(found[:, :1], Decoding(6, 300, end=0, barred=1, temperature=0), {
        "source_ids": sources.input_ids, "source_mask": sources.attention_mask})
    assert not found[:, 0].ne(1).any(), "padding starts a target"
    assert [[token for token in row[1:] if token > 1] for row in found.tolist()] == [row[:5] for row in mine]
