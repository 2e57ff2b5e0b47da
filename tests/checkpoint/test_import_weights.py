"""Every family there and back: the same logits in ``transformers``, bit for bit, and the same weights back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import check_command, check_export, check_import, names_of, quiet_transformers

from vpipe.app.data.tokenizers import train_wordpiece
from vpipe.app.families.registry import ModelSettings, family_named

LLAMA = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
         "intermediate_size": 40, "max_position_embeddings": 16, "rope_theta": 300.0, "rms_norm_eps": 1e-5}
LLAMA_31 = {**LLAMA, "num_key_value_heads": 6, "rope_scaling": {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8}}
GPT = {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_inner": 40, "n_positions": 16, "layer_norm_epsilon": 1e-6,
       "activation_function": "gelu_pytorch_tanh"}
BERT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40,
        "max_position_embeddings": 16, "type_vocab_size": 3, "layer_norm_eps": 1e-7}
QWEN3_MOE = {**LLAMA, "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", BERT), "gpt": ("gpt", GPT), "gpt-new": ("gpt", {**GPT, "activation_function": "gelu_new"}),
    "gpt-exact": ("gpt", {**GPT, "activation_function": "gelu"}),
    "llama": ("llama", LLAMA), "llama-3.1": ("llama", LLAMA_31), "llama-wide": ("llama", {**LLAMA, "head_dim": 8}),
    "qwen2": ("qwen2", LLAMA), "qwen3": ("qwen3", {**LLAMA, "head_dim": 8, "hidden_size": 26}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": None}),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 64}),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}), "qwen3-moe-shares": ("qwen3_moe", QWEN3_MOE)}
# transformers takes gates from a wider row; torch's vectorized SiLU rounds the end of a row of 40 in another way.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_same_logits(name: str, tied: bool, tmp_path: Path) -> None:
    family, sizes = MODELS[name]
    tokenizer = train_wordpiece([["the quick brown fox", "jumps over a dog"]], 60)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = check_export(family, sizes, tied, tmp_path / "out", tmp_path / "tokenizer.json" if tied else None)
    if family == "bert":
        assert theirs.config.hidden_dropout_prob == 0.1
    else:
        assert theirs.config.eos_token_id is None
    if tied:
        # AutoTokenizer takes Qwen2's own class, whatever the files say.
        kind = "PreTrainedTokenizerFast" if family == "qwen2" else "AutoTokenizer"
        made = getattr(quiet_transformers(), kind).from_pretrained(tmp_path / "out")
        read = made("The fox: a dog", "jumps").input_ids
        ids = tokenizer.encode("The fox: a dog").ids, tokenizer.encode("jumps").ids
        cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
        assert read == ([cls, *ids[0], sep, *ids[1], sep] if family == "bert" else [*ids[0], *ids[1]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_transformers_are_read_back(name: str, tied: bool, tmp_path: Path) -> None:
    check_import(*MODELS[name], tied, tmp_path)


def test_the_loss_of_experts_is_that_of_transformers() -> None:
    """Of one block: theirs counts the tokens of all blocks together, where ours is a mean over the blocks."""
    sizes = {**LLAMA, "num_hidden_layers": 1, "num_local_experts": 5, "num_experts_per_tok": 3}
    module = family_named("mixtral").factory(ModelSettings(50, overrides=sizes)).layers[1].materialize(1, seed=2)
    scores: list[Tensor] = []
    module.get_submodule("router").register_forward_hook(lambda *args: scores.append(args[2]))
    _, balance = module(torch.randn(2, 7, 24))
    theirs = quiet_transformers().models.mixtral.modeling_mixtral.load_balancing_loss_func(tuple(scores), 5, 3)
    assert balance.item() == pytest.approx(0.01 * theirs.item(), rel=2 ** -20)  # of some roundings in fp32


@pytest.mark.parametrize("name", ["gpt-new", "llama-3.1"])
def test_the_command_takes_every_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's is tested with its runs; this is what a family changes."""
    monkeypatch.chdir(tmp_path)
    check_command(*MODELS[name])


@pytest.mark.parametrize(("family", "theirs", "ours"), [
    ("gpt", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
    ("gpt", "lm_head.weight", "lm_head.weight"),
    ("gpt", "h.0.attn.c_attn.bias", "transformer.h.0.attn.c_attn.bias"), ("gpt", "transformer.h.0.attn.bias", None),
    ("gpt", "h.11.attn.masked_bias", None), ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", None)])
def test_older_files_spell_differently(family: str, theirs: str, ours: str | None) -> None:
    assert names_of(family).spelled(theirs) == ours
