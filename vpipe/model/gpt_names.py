"""GPT's weights under the names of Hugging Face's ``GPT2LMHeadModel``."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Ends of names of the matrices that GPT-2 stores as [inputs, outputs]."""

_WORDS = "block0.attention.embeddings.token.weight"

# (ours, theirs) below a layer, without .weight and .bias; in Hugging Face's order.
_ATTENTION = (("norm", "ln_1"), ("qkv", "attn.c_attn"), ("output", "attn.c_proj"))
_MLP = (("norm", "ln_2"), ("expand", "mlp.c_fc"), ("contract", "mlp.c_proj"))


def huggingface_names(config: Mapping[str, object]) -> dict[str, str]:
    """Their names -> ours; ``config`` holds the keys of a ``GPT2Config``."""
    blocks = config["n_layer"]
    assert isinstance(blocks, int), "a checked config"
    names = {"transformer.wte.weight": _WORDS,
             "transformer.wpe.weight": "block0.attention.embeddings.position.weight"}
    for block in range(blocks):
        attention = f"block{block}.attention" + (".attention" if block == 0 else "")  # the first is with the embeddings
        for ours, theirs in _ATTENTION:
            names |= _both(f"transformer.h.{block}.{theirs}", f"{attention}.{ours}")
        for ours, theirs in _MLP:
            names |= _both(f"transformer.h.{block}.{theirs}", f"block{block}.mlp.{ours}")
    names |= _both("transformer.ln_f", "head.norm")
    return names if config["tie_word_embeddings"] else {**names, "lm_head.weight": "head.decoder.weight"}


def huggingface_copies(config: Mapping[str, object]) -> dict[str, str]:
    """The name that some files have for the weight that ``tie_word_embeddings`` shares."""
    return {"lm_head.weight": _WORDS} if config["tie_word_embeddings"] else {}


def huggingface_spelled(name: str) -> str | None:
    """Today's spelling: the files published first lack the prefix, and hold the masks of attention."""
    if re.search(r"\.attn\.(masked_)?bias$", name):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _both(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")}
