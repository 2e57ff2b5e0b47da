"""Every family there and back: the same logits in ``transformers``, bit for bit, and the same weights back again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.app.cli import main
from vpipe.app.data.tokenizers import train_byte_bpe, train_wordpiece
from vpipe.app.families.registry import HuggingFace, ModelSettings, family_named
from vpipe.app.weights.export import export_huggingface
from vpipe.app.weights.import_weights import import_weights, read_model_config
from vpipe.extras.translation.translations import translate
from vpipe.model.model import Model

LLAMA = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
         "intermediate_size": 40, "max_position_embeddings": 16, "rope_theta": 300.0, "rms_norm_eps": 1e-5}
LLAMA_31 = {**LLAMA, "num_key_value_heads": 6, "rope_scaling": {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8}}
GPT = {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_inner": 40, "n_positions": 16, "layer_norm_epsilon": 1e-6,
       "activation_function": "gelu_pytorch_tanh"}
BERT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40,
        "max_position_embeddings": 16, "type_vocab_size": 3, "layer_norm_eps": 1e-7}
MARIAN = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
          "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 56, "max_position_embeddings": 16,
          "activation_function": "swish", "scale_embedding": True, "pad_token_id": 49, "decoder_start_token_id": 49,
          "eos_token_id": 0, "decoder_vocab_size": 50}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", BERT), "gpt": ("gpt", GPT), "gpt-new": ("gpt", {**GPT, "activation_function": "gelu_new"}),
    "gpt-exact": ("gpt", {**GPT, "activation_function": "gelu"}),
    "llama": ("llama", LLAMA), "llama-3.1": ("llama", LLAMA_31),
    "marian": ("translation", MARIAN)}
MARIAN_TIES = "share_encoder_decoder_embeddings"


def names_of(family: str) -> HuggingFace:
    found = family_named(family).huggingface
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
    return {"source_ids": torch.randint(1, 50, (4, 11), generator=generator) * mask, "source_mask": mask,
            "target_ids": torch.randint(1, 50, (4, 7), generator=generator),
            "input_ids": torch.randint(1, 50, (4, 11), generator=generator) * mask,
            "segment_ids": torch.randint(0, 3, (4, 11), generator=generator), "input_mask": mask,
            "masked_lm_positions": torch.arange(11).expand(4, 11)}


@torch.no_grad()
def our_logits(model: Model, modules: nn.ModuleDict, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Of every word [B, S, V]; and BERT's of the next sentence [B, 2]."""
    tensors = dict(fields)
    for layer in model.layers[:-1]:
        tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
    inputs = [tensors[name] for name in model.layers[-1].inputs if name in tensors]
    found = modules["head"].scores(*inputs)
    return found if isinstance(found, tuple) else (found,)


@torch.no_grad()
def their_logits(theirs: Any, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    if theirs.config.model_type == "marian":
        return (theirs.eval()(fields["source_ids"], fields["source_mask"], fields["target_ids"]).logits,)
    if theirs.config.model_type != "bert":
        return (theirs.eval()(fields["input_ids"]).logits,)
    found = theirs.eval()(fields["input_ids"], fields["input_mask"], fields["segment_ids"])
    return found.prediction_logits, found.seq_relationship_logits


@pytest.fixture
def transformers() -> Any:
    """Imported by who tests with it alone, for it takes seconds; it shows bars, and its warnings are looked at."""
    found = pytest.importorskip("transformers")
    found.utils.logging.disable_progress_bar()
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_same_logits(name: str, tied: bool, transformers: Any, tmp_path: Path) -> None:
    family, sizes = MODELS[name]
    settings = ModelSettings(50, tie_weights=tied, overrides=sizes)
    model = family_named(family).factory(settings)
    torch.manual_seed(1)
    modules = model.materialize().eval()
    for parameter in (*modules.parameters(), *modules["head"].buffers()):  # norms, too, so that a swap of two is seen
        nn.init.normal_(parameter, std=0.3)
    with_tokenizer = tied and family != "translation"
    tokenizer = train_wordpiece([["the quick brown fox", "jumps over a dog"]], 60)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    export_huggingface(weights_of(model, modules), names_of(family), settings, tmp_path / "out",
                       tmp_path / "tokenizer.json" if with_tokenizer else None)

    theirs, report = getattr(transformers, names_of(family).architecture).from_pretrained(
        tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    fields = batch()
    assert all(map(torch.equal, their_logits(theirs, fields), our_logits(model, modules, fields)))
    assert theirs.config.tie_word_embeddings == tied
    if family == "bert":
        assert theirs.config.hidden_dropout_prob == 0.1
    else:
        assert theirs.config.eos_token_id == (0 if family == "translation" else None)
    if with_tokenizer:
        read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("The fox: a dog", "jumps").input_ids
        ids = tokenizer.encode("The fox: a dog").ids, tokenizer.encode("jumps").ids
        cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
        assert read == ([cls, *ids[0], sep, *ids[1], sep] if family == "bert" else [*ids[0], *ids[1]])


def test_a_translation_model_goes_with_its_tokenizer(transformers: Any, tmp_path: Path) -> None:
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
    mine = translate(model, modules, {"source_ids": sources.input_ids, "source_mask": sources.attention_mask}, 1, 0,
                     300, 6)
    assert not found[:, 0].ne(1).any(), "padding starts a target"
    assert [[token for token in row[1:] if token > 1] for row in found.tolist()] == [row[:5] for row in mine]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_transformers_are_read_back(name: str, tied: bool, transformers: Any, tmp_path: Path) -> None:
    family, sizes = MODELS[name]
    torch.manual_seed(2)
    kind = getattr(transformers, names_of(family).architecture)
    more = {MARIAN_TIES: tied} if family == "translation" else {}
    theirs = kind(kind.config_class(vocab_size=50, tie_word_embeddings=tied, **sizes, **more)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "several files, as large models come in"

    found = read_model_config(tmp_path)
    assert (found.family, found.settings.tie_weights) == (family, tied)
    model = family_named(family).factory(found.settings)
    weights = import_weights(tmp_path, names_of(family), found.settings, note=pytest.fail)
    modules = model.materialize().eval()
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights_of(model, modules).items()}
    modules.load_state_dict(weights, strict=False)
    fields = batch()
    assert all(map(torch.equal, their_logits(theirs, fields), our_logits(model, modules, fields)))


@pytest.mark.parametrize("name", ["gpt-new", "llama-3.1", "marian"])
def test_the_command_takes_every_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's is tested with its runs; this is what a family changes. No transformers in it."""
    monkeypatch.chdir(tmp_path)
    family, sizes = MODELS[name]
    settings = ModelSettings(50, tie_weights=True, overrides=sizes)
    model = family_named(family).factory(settings)
    export_huggingface(weights_of(model, model.materialize(3)), names_of(family), settings, Path("hf"))
    assert main(["checkpoint", "import", "hf", "-o", "own"]) == 0
    assert main(["checkpoint", "export", "own", "--format", "huggingface", "-o", "again"]) == 0
    for file in ("model.safetensors", "config.json"):
        assert Path("again", file).read_bytes() == Path("hf", file).read_bytes(), file


@pytest.mark.parametrize(("family", "theirs", "ours"), [
    ("gpt", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
    ("gpt", "lm_head.weight", "lm_head.weight"),
    ("gpt", "h.0.attn.c_attn.bias", "transformer.h.0.attn.c_attn.bias"), ("gpt", "transformer.h.0.attn.bias", None),
    ("gpt", "h.11.attn.masked_bias", None), ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", None)])
def test_older_files_spell_differently(family: str, theirs: str, ours: str | None) -> None:
    assert names_of(family).spelled(theirs) == ours
