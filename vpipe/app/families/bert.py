"""BERT pre-training (Devlin et al. 2019, arXiv:1810.04805) in layers of half a block each.

A layer is attention + add + norm, or MLP + add + norm (post-norm, as published). The embeddings ride with
the first layer and the head is the last, so n blocks make 2n + 1 layers: BERT-large has 49. In eval mode the
order of operations is that of Hugging Face's ``BertForPreTraining``.

Shapes: B batch (samples), S sequence (tokens), P predictions per sample, H hidden size, A attention heads,
D = H / A head size, I intermediate size, V vocabulary size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe import Layer, Model
from vpipe.app.families import tensor_parallel as tp
from vpipe.app.families.registry import HuggingFace, ModelSettings, register_model
from vpipe.app.families.transformer import Blocks, ConfigKeys, attention, block_weight_names, weight_names
from vpipe.errors import UserError

_WORDS = "block0.attention.embeddings.word.weight"
_DECODER_BIAS = "head.decoder.bias"

# (ours, theirs) below a layer, without .weight and .bias; in Hugging Face's order, which is also VPipe's.
_EMBEDDINGS = (("word", "word_embeddings"), ("position", "position_embeddings"), ("segment", "token_type_embeddings"))
_ATTENTION = (("query", "attention.self.query"), ("key", "attention.self.key"), ("value", "attention.self.value"),
              ("output", "attention.output.dense"), ("norm", "attention.output.LayerNorm"))
_MLP = (("expand", "intermediate.dense"), ("contract", "output.dense"), ("norm", "output.LayerNorm"))
_HEAD = (("transform", "transform.dense"), ("norm", "transform.LayerNorm"))


def huggingface_names(config: Mapping[str, object]) -> dict[str, str]:
    """Map Hugging Face's names of the weights to ours; ``config`` holds the keys of a ``BertConfig``.

    The decoder's bias has two names there, which ``tie_word_embeddings`` makes one parameter. Without it only the
    decoder's own is computed with; the other is written so that nothing is missing.
    """
    names = _trunk_names(config["num_hidden_layers"], "bert.")
    names |= weight_names("bert.pooler", "head", (("pooler", "dense"),))
    names |= {"cls.predictions.bias": _DECODER_BIAS} | weight_names("cls.predictions", "head", _HEAD)
    if not config["tie_word_embeddings"]:
        names |= {"cls.predictions.decoder.weight": "head.decoder.weight",
                  "cls.predictions.decoder.bias": _DECODER_BIAS}
    return names | weight_names("cls", "head", (("next_sentence", "seq_relationship"),))


def huggingface_copies(config: Mapping[str, object]) -> dict[str, str]:
    """Map the names that older files have for the weights that ``tie_word_embeddings`` shares."""
    tied = {"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": _DECODER_BIAS}
    return tied if config["tie_word_embeddings"] else {}


def huggingface_spelled(name: str) -> str | None:
    """Return today's name of a weight (old files: gamma, beta, dense_act), or None where it is computed."""
    if name == "bert.embeddings.position_ids":
        return None
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    return name.replace(".dense_act.", ".dense.")


def stage_file_order(settings: ModelSettings) -> list[str]:
    """Return our names in the order of the first VPipe's stages, which had neither pooler nor classifier.

    A block's last norm may lie in the file of the next stage, which does not change the order.
    """
    names = _trunk_names(config_from_settings(settings).num_hidden_layers, "") | weight_names("", "head", _HEAD)
    return [*names.values(), "head.decoder.weight", _DECODER_BIAS]


def _trunk_names(blocks: object, prefix: str) -> dict[str, str]:
    """Map Hugging Face's names of the weights below the head to ours."""
    ours = "block0.attention.embeddings"
    return (weight_names(f"{prefix}embeddings", ours, _EMBEDDINGS, ("weight",))
            | weight_names(f"{prefix}embeddings", ours, (("norm", "LayerNorm"),))
            | block_weight_names(f"{prefix}encoder.layer", blocks, _ATTENTION, _MLP))


KEYS = ConfigKeys(
    "BERT",
    # Turc et al. 2019, arXiv:1908.08962, table 1; base and large: Devlin et al., section 3.
    presets={name: {"num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads}
             for name, blocks, hidden, heads in (
                 ("tiny", 2, 128, 2), ("mini", 4, 256, 4), ("small", 4, 512, 8), ("medium", 8, 512, 8),
                 ("base", 12, 768, 12), ("large", 24, 1024, 16))},
    fixed={"hidden_act": "gelu", "position_embedding_type": "absolute", "pad_token_id": 0, "model_type": "bert",
           "is_decoder": False, "add_cross_attention": False, "is_encoder_decoder": False, "pruned_heads": {},
           "chunk_size_feed_forward": 0, "directionality": "bidi", "pooler_type": "first_token_transform"},
    silent={"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "gradient_checkpointing",
            "_name_or_path", "classifier_dropout", "id2label", "label2id", "output_all_encoded_layers",
            "output_attentions", "output_hidden_states", "return_dict", "pooler_fc_size",
            "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "problem_type",
            "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"})

PREDICTED_SHARE = 0.15
"""Largest share of a sample's tokens that the head scores (Devlin et al., section 3.1)."""


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT under the key names, and with the defaults, of Hugging Face's ``BertConfig``.

    ``intermediate_size`` is 4 ``hidden_size`` where it is None. Dropouts are probabilities in [0, 1).
    ``tie_word_embeddings`` makes the decoder of the head share the word embeddings' weight. Raises one UserError
    naming every value out of range.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: Blocks = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        KEYS.check(self, "hidden_size num_attention_heads")

    @property
    def inner(self) -> int:
        """Return the width of the MLP."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size


def bert(config: BertConfig) -> Model:
    """Return BERT with its pre-training loss as 2n + 1 layers for n blocks.

    Batch fields, all int64: ``input_ids``, ``segment_ids``, ``input_mask`` (1 = token, 0 = padding) [B, S];
    ``masked_lm_positions``, ``masked_lm_ids`` (0 = no prediction) [B, P]; ``next_sentence_labels`` [B].
    The only tensor between layers is ``h`` [B, S, H]: each attention layer reads the mask from the batch.
    """
    layers = [Layer("block0.attention", partial(BertEmbeddingsAndAttention, config),
                    inputs=("input_ids", "segment_ids", "input_mask"))]
    for i in range(config.num_hidden_layers):
        if i > 0:
            layers.append(Layer(f"block{i}.attention", partial(BertAttention, config), inputs=("h", "input_mask")))
        layers.append(Layer(f"block{i}.mlp", partial(BertMlp, config)))
    layers.append(Layer("head", partial(BertHead, config), outputs=("loss",),
                        inputs=("h", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels"),
                        ties={"decoder.weight": _WORDS} if config.tie_word_embeddings else {}))
    return Model(layers, batch=("input_ids", "segment_ids", "input_mask", "masked_lm_positions", "masked_lm_ids",
                                "next_sentence_labels"))


def _from_huggingface(config: Mapping[str, object]) -> ModelSettings:
    """Return the settings for a ``config.json``. Missing keys have the defaults of Hugging Face's ``BertConfig``."""
    values: dict[str, Any] = {**vars(BertConfig()), "intermediate_size": 3072, **config}
    made = config_from_settings(ModelSettings(values["vocab_size"], overrides=values))
    return ModelSettings(made.vocab_size, tie_weights=made.tie_word_embeddings, overrides=values)


def _huggingface_config(settings: ModelSettings) -> dict[str, object]:
    """Return every field, and the values of keys for which Hugging Face's BERT could compute something else."""
    config = config_from_settings(settings)
    return {**vars(config), "intermediate_size": config.inner, "hidden_act": KEYS.fixed["hidden_act"],
            "pad_token_id": KEYS.fixed["pad_token_id"]}


def _flops(settings: ModelSettings) -> list[int]:
    """Count the operations of every layer per token.

    The head scores 15 % of a sample's tokens, rounded up, and one sentence. Its operations are spread over all tokens
    of the sample, to the nearest integer.
    """
    config = config_from_settings(settings)
    h, i, v = config.hidden_size, config.inner, config.vocab_size
    s = settings.sequence_length or config.max_position_embeddings
    norm = 2 * h
    attention = 2 * (4 * h * h + 4 * h + norm) + 4 * h * s
    mlp = 2 * (2 * h * i + i + h + norm)
    words, sentence = 2 * (h * h + h + norm + v * h + v), 2 * (h * h + h + 2 * h + 2)
    head = round((math.ceil(PREDICTED_SHARE * s) * words + sentence) / s)
    return [2 * norm + attention, mlp, *(attention, mlp) * (config.num_hidden_layers - 1), head]


def _tensor_sizes(settings: ModelSettings) -> dict[str, int]:
    config = config_from_settings(settings)
    return {"vocab_size": config.vocab_size, "num_heads": config.num_attention_heads,
            "intermediate_size": config.inner,
            "sequence_length": settings.sequence_length or config.max_position_embeddings}


@register_model("bert", stage_order=stage_file_order, flops=_flops, tensor_sizes=_tensor_sizes, presets=KEYS.presets,
                datasets=("text", "bert_hdf5"), huggingface=HuggingFace(
    "bert", "BertForPreTraining", "BertTokenizer", _from_huggingface, _huggingface_config, huggingface_names,
    huggingface_copies, huggingface_spelled))
def bert_from_settings(settings: ModelSettings) -> Model:
    """Return BERT from a config file's ``model`` section. Raises UserError for a sequence longer than its positions."""
    config = config_from_settings(settings)
    KEYS.check_length(settings.sequence_length or 1, config.max_position_embeddings, "max_position_embeddings")
    return bert(config)


def config_from_settings(settings: ModelSettings) -> BertConfig:
    """Merge the preset (default large), ``overrides`` (of a ``bert_config.json``) and the settings; the later wins."""
    if settings.overrides.get("intermediate_size", 0) is None:
        raise UserError("BERT's intermediate_size is None", hint="it must be an integer, such as 4 times hidden_size")
    preset = "large" if settings.preset is None else settings.preset
    return BertConfig(**KEYS.merge(BertConfig, preset, settings.overrides, {
        "vocab_size": settings.vocab_size, "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers, "num_attention_heads": settings.num_heads,
        "hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": settings.dropout,
        "tie_word_embeddings": settings.tie_weights}))


class BertEmbeddings(nn.Module):
    """Word + segment + position embeddings, normalised: two int64 [B, S] -> [B, S, H]."""

    tensor_plan: ClassVar = {"word": tp.vocabulary, "segment": tp.norm, "position": tp.table, "part": tp.part,
                             "norm": tp.norm, "dropout": tp.dropout}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.part = nn.Identity()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.apply(partial(_initialise, std=config.initializer_range))

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        KEYS.check_length(length, self.position.num_embeddings, "max_position_embeddings")
        segment: Tensor = self.segment(self.part(segment_ids))
        embedded = self.word(input_ids) + segment  # Hugging Face's order of the sum
        position = self.part(self.position.weight[None, :length])
        return self.dropout(self.norm(embedded + position))  # type: ignore[no-any-return]


class BertAttention(nn.Module):
    """Self-attention + add + norm: [B, S, H] and the mask int64 [B, S] -> [B, S, H]."""

    tensor_plan: ClassVar = {"whole": tp.gathered, "query": tp.column, "key": tp.column, "value": tp.column,
                             "attention_dropout": tp.dropout_along(1), "output": tp.row, "dropout": tp.dropout,
                             "norm": tp.norm}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_size = size // config.num_attention_heads
        self.whole = nn.Identity()
        self.attention_dropout = nn.Dropout(config.attention_probs_dropout_prob)
        # Three projections: one fused [3H, H] is no faster (36.3 against 37.0 ms at H 256, B 16, S 128 on one core;
        # 53.6 against 53.7 at H 1024, B 2), and three are the published names.
        self.query, self.key, self.value = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.output = nn.Linear(size, size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.apply(partial(_initialise, std=config.initializer_range))

    def forward(self, h: Tensor, input_mask: Tensor) -> Tensor:
        read = self.whole(h)
        query, key, value = (projection(read).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, A, S, D]
                             for projection in (self.query, self.key, self.value))
        mixed = attention(query, key, value, mask=(input_mask != 0)[:, None, None, :], dropout=self.attention_dropout)
        mixed = self.output(mixed.transpose(1, 2).flatten(2))
        return self.norm(self.dropout(mixed) + h)  # type: ignore[no-any-return]


class BertEmbeddingsAndAttention(nn.Module):
    """The first layer: embeddings and the first block's attention."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.attention = BertAttention(config)

    def forward(self, input_ids: Tensor, segment_ids: Tensor, input_mask: Tensor) -> Tensor:
        return self.attention(self.embeddings(input_ids, segment_ids), input_mask)  # type: ignore[no-any-return]


class BertMlp(nn.Module):
    """Expand to I, gelu (the exact one, with erf), contract, add + norm: [B, S, H] -> [B, S, H]."""

    tensor_plan: ClassVar = {"expand": tp.column, "contract": tp.row, "dropout": tp.dropout, "norm": tp.norm}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.hidden_size, config.inner)
        self.contract = nn.Linear(config.inner, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.apply(partial(_initialise, std=config.initializer_range))

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(self.dropout(self.contract(F.gelu(self.expand(h)))) + h)  # type: ignore[no-any-return]


class BertHead(nn.Module):
    """Both pre-training losses, added: [B, S, H] and the labels -> a scalar (Devlin et al., appendix A.2).

    Masked LM: cross-entropy, mean over the predictions whose id is not 0; without any it is 0, not nan. Next
    sentence: cross-entropy of a 2-way classifier on the pooled first token, mean over samples.
    """

    tensor_plan: ClassVar = {"whole": tp.whole, "transform": tp.replicated, "norm": tp.replicated, "decoder": tp.scores,
                             "pooler": tp.replicated, "next_sentence": tp.replicated}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.whole = nn.Identity()
        self.transform = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(size, config.vocab_size)
        self.pooler = nn.Linear(size, size)
        self.next_sentence = nn.Linear(size, 2)
        self.apply(partial(_initialise, std=config.initializer_range))

    def scores(self, h: Tensor, masked_lm_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits over the vocabulary at the masked positions [B, P, V], and of the next sentence [B, 2]."""
        h = self.whole(h)
        masked = h.gather(1, masked_lm_positions[:, :, None].expand(-1, -1, h.shape[-1]))
        words = self.decoder(self.norm(F.gelu(self.transform(masked))))
        return words, self.next_sentence(torch.tanh(self.pooler(h[:, 0])))

    def forward(self, h: Tensor, masked_lm_positions: Tensor, masked_lm_ids: Tensor,
                next_sentence_labels: Tensor) -> Tensor:
        words, sentence = self.scores(h, masked_lm_positions)
        word_loss = tp.cross_entropy(words, masked_lm_ids, ignored=0)
        predictions = (masked_lm_ids != 0).sum().clamp(min=1)
        return word_loss / predictions + F.cross_entropy(
            sentence.to(torch.promote_types(sentence.dtype, torch.float32)), next_sentence_labels)


def _initialise(module: nn.Module, std: float) -> None:
    """Set weights to normal(0, std), biases and the padding word to 0, as Hugging Face does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])
