"""BERT's weights under other names: Hugging Face's ``BertForPreTraining``, and the files of the first VPipe."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORDS = "block0.attention.embeddings.word.weight"
_DECODER_BIAS = "head.decoder.bias"

# (ours, theirs) below a layer, without .weight and .bias; in Hugging Face's order, which is also VPipe's.
_EMBEDDINGS = (("word", "word_embeddings"), ("position", "position_embeddings"), ("segment", "token_type_embeddings"))
_ATTENTION = (("query", "self.query"), ("key", "self.key"), ("value", "self.value"), ("output", "output.dense"),
              ("norm", "output.LayerNorm"))
_MLP = (("expand", "intermediate.dense"), ("contract", "output.dense"), ("norm", "output.LayerNorm"))
_HEAD = (("transform", "transform.dense"), ("norm", "transform.LayerNorm"))


def huggingface_names(config: Mapping[str, object]) -> dict[str, str]:
    """Their names -> ours; ``config`` holds the keys of a ``BertConfig``.

    The decoder's bias has two names there, which ``tie_word_embeddings`` makes one parameter. Without it only the
    decoder's own is computed with; the other is written so that nothing is missing.
    """
    blocks, tied = config["num_hidden_layers"], config["tie_word_embeddings"]
    assert isinstance(blocks, int), "a checked config"
    names = _embeddings("bert.embeddings")
    for block in range(blocks):
        names |= _block(block, f"bert.encoder.layer.{block}")
    names |= _both("bert.pooler.dense", "head.pooler")
    names["cls.predictions.bias"] = _DECODER_BIAS
    for ours, theirs in _HEAD:
        names |= _both(f"cls.predictions.{theirs}", f"head.{ours}")
    if not tied:
        names |= {"cls.predictions.decoder.weight": "head.decoder.weight",
                  "cls.predictions.decoder.bias": _DECODER_BIAS}
    return names | _both("cls.seq_relationship", "head.next_sentence")


def huggingface_copies(config: Mapping[str, object]) -> dict[str, str]:
    """Names that older files have for the weights that ``tie_word_embeddings`` shares."""
    if not config["tie_word_embeddings"]:
        return {}
    return {"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": _DECODER_BIAS}


def huggingface_spelled(name: str) -> str | None:
    """Today's spelling: files of before 2020 say gamma and beta, NVIDIA's say dense_act, and both have positions."""
    if name == "bert.embeddings.position_ids":
        return None
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    return name.replace(".dense_act.", ".dense.")


def stage_file_order(blocks: int) -> list[str]:
    """Our names in the order in which the first VPipe's stages hold them, from the first stage to the last.

    Its BERT was trained without the next sentence: it has neither pooler nor classifier. A block's last norm may
    lie in the file of the next stage, which does not change the order.
    """
    names = list(_embeddings("").values())
    for block in range(blocks):
        names += _block(block, "").values()
    names += [f"head.{ours}.{leaf}" for ours, _ in _HEAD for leaf in ("weight", "bias")]
    return [*names, "head.decoder.weight", _DECODER_BIAS]


def _embeddings(theirs: str) -> dict[str, str]:
    ours = "block0.attention.embeddings"
    return {f"{theirs}.{name}.weight": f"{ours}.{own}.weight" for own, name in _EMBEDDINGS} | _both(
        f"{theirs}.LayerNorm", f"{ours}.norm")


def _block(block: int, theirs: str) -> dict[str, str]:
    attention = f"block{block}.attention" + (".attention" if block == 0 else "")  # the first is with the embeddings
    names: dict[str, str] = {}
    for ours, name in _ATTENTION:
        names |= _both(f"{theirs}.attention.{name}", f"{attention}.{ours}")
    for ours, name in _MLP:
        names |= _both(f"{theirs}.{name}", f"block{block}.mlp.{ours}")
    return names


def _both(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")}
