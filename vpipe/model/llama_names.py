"""LLaMA's weights under the names of Hugging Face's ``LlamaForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping

_WORDS = "block0.attention.embeddings.token.weight"

# (ours, theirs) below a layer, without .weight; in Hugging Face's order.
_ATTENTION = (("query", "self_attn.q_proj"), ("key", "self_attn.k_proj"), ("value", "self_attn.v_proj"),
              ("output", "self_attn.o_proj"), ("norm", "input_layernorm"))
_MLP = (("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj"),
        ("norm", "post_attention_layernorm"))


def huggingface_names(config: Mapping[str, object]) -> dict[str, str]:
    """Their names -> ours; ``config`` holds the keys of a ``LlamaConfig``."""
    blocks = config["num_hidden_layers"]
    assert isinstance(blocks, int), "a checked config"
    names = {"model.embed_tokens.weight": _WORDS}
    for block in range(blocks):
        attention = f"block{block}.attention" + (".attention" if block == 0 else "")  # the first is with the embeddings
        names |= {f"model.layers.{block}.{theirs}.weight": f"{attention}.{ours}.weight" for ours, theirs in _ATTENTION}
        names |= {f"model.layers.{block}.{theirs}.weight": f"block{block}.mlp.{ours}.weight" for ours, theirs in _MLP}
    names["model.norm.weight"] = "head.norm.weight"
    return names if config["tie_word_embeddings"] else {**names, "lm_head.weight": "head.decoder.weight"}


def huggingface_copies(config: Mapping[str, object]) -> dict[str, str]:
    """The name that some files have for the weight that ``tie_word_embeddings`` shares."""
    return {"lm_head.weight": _WORDS} if config["tie_word_embeddings"] else {}


def huggingface_spelled(name: str) -> str | None:
    """Today's spelling: older files hold the rotary frequencies, which are computed."""
    return None if name.endswith(".rotary_emb.inv_freq") else name
