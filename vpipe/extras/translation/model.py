"""The Transformer (Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762), which translates a sentence.

A block of the encoder is two layers, self-attention and MLP, a block of the decoder three: self-attention, attention to
the encoder's output, MLP. Each is a sublayer + add + norm (post-norm, as published), or norm + sublayer + add with
``pre_norm``. The embeddings ride with the first layer of the encoder and of the decoder. The head is the last layer. So
n + n blocks make 5n + 1 layers: 31 for base. In eval mode the order of operations is that of Hugging Face's
``MarianMTModel``.

Shapes, as names end: b batch (samples), s source (tokens), t target (tokens), h hidden size, a attention heads,
d = h / a head size, i inner size of the MLP, v vocabulary size of the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe import Layer, Model
from vpipe.app.families import tensor_parallel as tp
from vpipe.app.families.kv_cache import KeyValueCache
from vpipe.app.families.registry import HuggingFace, ModelSettings, register_model
from vpipe.app.families.transformer import (
    Blocks,
    ConfigKeys,
    Names,
    Positive,
    TokenId,
    attention,
    is_label,
    next_token_loss,
    weight_names,
)
from vpipe.errors import UserError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu, "silu": F.silu}

KEYS = ConfigKeys(
    "translation",
    # base and big: Vaswani et al., table 3. tiny and small are sizes for one machine.
    presets={name: {"encoder_layers": blocks, "decoder_layers": blocks, "d_model": hidden,
                    "encoder_attention_heads": heads, "decoder_attention_heads": heads, "dropout": dropout,
                    "scale_embedding": True, "activation_function": "relu", "init_std": None, "pad_token_id": 0,
                    "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
             for name, blocks, hidden, heads, dropout in (
                 ("tiny", 2, 128, 4, 0.1), ("small", 4, 256, 4, 0.1), ("base", 6, 512, 8, 0.1),
                 ("big", 6, 1024, 16, 0.3))},
    fixed={"model_type": "marian", "is_encoder_decoder": True, "is_decoder": False, "add_cross_attention": False,
           "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "static_position_embeddings": True,
           "normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False,
           "add_bias_logits": False, "pruned_heads": {}, "chunk_size_feed_forward": 0},
    silent={"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "gradient_checkpointing",
            "_name_or_path", "_num_labels", "bos_token_id", "forced_bos_token_id", "sep_token_id", "unk_token_id",
            "cls_token_id", "bad_words_ids", "classif_dropout", "classifier_dropout", "extra_pos_embeddings",
            "id2label", "label2id", "max_length", "min_length", "num_beams", "length_penalty", "early_stopping",
            "no_repeat_ngram_size", "save_step", "output_attentions", "output_hidden_states", "output_past",
            "return_dict", "problem_type", "prefix", "task_specific_params", "do_blenderbot_90_layernorm",
            "tokenizer_class"},
    choices={"activation_function": tuple(ACTIVATIONS)})


_SAME = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers",
         "num_attention_heads": "encoder_attention_heads"}
"""Further names that Marian has for some of its keys."""


@dataclass(frozen=True)
class TranslationConfig:
    """The sizes of a Transformer under the key names, and with the defaults, of Hugging Face's ``MarianConfig``.

    The widths of the MLPs are 4 ``d_model`` where they are None, and ``decoder_vocab_size`` is ``vocab_size``. Source
    and target embeddings are one with ``share_encoder_decoder_embeddings``; ``tie_word_embeddings`` makes the head
    share those of the target. Weights begin as normal(0, ``init_std``); where it is None, matrices as Glorot and
    Bengio's uniform ones, and embeddings as normal(0, 1/sqrt(``d_model``)), which fits ``scale_embedding`` (Vaswani et
    al., 3.4). The last two fields are no keys of Marian. Raises one UserError naming every value out of range.
    """

    vocab_size: int = 58101
    decoder_vocab_size: int | None = None
    d_model: int = 1024
    encoder_layers: Blocks = 12
    decoder_layers: Blocks = 12
    encoder_attention_heads: int = 16
    decoder_attention_heads: int = 16
    encoder_ffn_dim: int | None = None
    decoder_ffn_dim: int | None = None
    max_position_embeddings: int = 1024
    activation_function: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_std: Positive | None = 0.02
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: TokenId | None = 58100
    eos_token_id: TokenId | None = 0
    decoder_start_token_id: TokenId | None = 58100
    forced_eos_token_id: TokenId | None = 0
    pre_norm: bool = False
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        KEYS.check(self, "d_model encoder_attention_heads")
        KEYS.check(self, "d_model decoder_attention_heads")
        if self.share_encoder_decoder_embeddings and self.target_vocab_size != self.vocab_size:
            raise UserError(f"the vocabulary of the target has {self.target_vocab_size} tokens, that of the source "
                            f"{self.vocab_size}, but both share one table of embeddings",
                            hint="make decoder_vocab_size equal, or share_encoder_decoder_embeddings false")

    @property
    def target_vocab_size(self) -> int:
        return self.vocab_size if self.decoder_vocab_size is None else self.decoder_vocab_size

    def inner(self, side: str) -> int:
        """Return the width of the MLPs of ``encoder`` or ``decoder``."""
        width: int | None = getattr(self, f"{side}_ffn_dim")
        return 4 * self.d_model if width is None else width


@dataclass(frozen=True)
class TranslationOptions:
    """The keys of ``model.options``; None takes the value of ``config_file``, else the published one.

    Attributes:
        label_smoothing: share of a label's probability that all tokens get, in training alone; published: 0.1.
        pre_norm: norm before each sublayer instead of behind the sum.
    """

    label_smoothing: float | None = None
    pre_norm: bool | None = None


def config_from_settings(settings: ModelSettings) -> TranslationConfig:
    """Merge the preset (default base), ``overrides`` (a file with Marian's keys) and the settings; the later wins.

    ``num_layers`` and ``num_heads`` count those of the encoder, and as many of the decoder. ``tie_weights`` ties the
    embeddings of source and target, unless the file says whether they are, and the head. Without
    ``max_position_embeddings`` there are positions for as many tokens as a sample has, and for 1,024 at least.
    """
    preset = "base" if settings.preset is None else settings.preset
    tied, options = settings.tie_weights, settings.options or TranslationOptions()
    shared = {} if "share_encoder_decoder_embeddings" in settings.overrides else {
        "share_encoder_decoder_embeddings": tied}
    positions = max(settings.sequence_length or 1, TranslationConfig.max_position_embeddings)
    overrides = dict(settings.overrides)
    again = {key: overrides.pop(key) for key in _SAME if key in overrides}
    values = KEYS.merge(TranslationConfig, preset, overrides, {
        "vocab_size": settings.vocab_size, "d_model": settings.hidden_size, "encoder_layers": settings.num_layers,
        "decoder_layers": settings.num_layers, "encoder_attention_heads": settings.num_heads,
        "decoder_attention_heads": settings.num_heads, "dropout": settings.dropout, "tie_word_embeddings": tied,
        **shared, "label_smoothing": options.label_smoothing, "pre_norm": options.pre_norm})
    config = TranslationConfig(**{"max_position_embeddings": positions, **values})
    for key, value in again.items():
        if value != getattr(config, _SAME[key]):
            raise UserError(f"'{key}' is {value!r}, but '{_SAME[key]}' is {getattr(config, _SAME[key])!r}",
                            hint=f"leave out '{key}': for Marian it is another name of '{_SAME[key]}'")
    return config


def from_huggingface(found: Mapping[str, object]) -> ModelSettings:
    """Return the settings for a ``config.json``. Missing keys have the defaults of ``MarianConfig``."""
    values: dict[str, Any] = {**vars(TranslationConfig()), "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, **found}
    config = config_from_settings(ModelSettings(values["vocab_size"], overrides=values))
    _check_ties(config)
    if config.decoder_start_token_id != config.pad_token_id:
        raise UserError(f"decoder_start_token_id is {config.decoder_start_token_id} and pad_token_id "
                        f"{config.pad_token_id}, but vpipe starts every translation with padding",
                        hint="take a model that was trained so, as published ones of Marian are")
    return ModelSettings(config.vocab_size, tie_weights=config.tie_word_embeddings, overrides=values)


def huggingface_config(settings: ModelSettings) -> dict[str, object]:
    """Return Marian's keys. Raises UserError for what Marian does not compute."""
    config = config_from_settings(settings)
    _check_ties(config)
    if config.pre_norm:
        raise UserError("the model has a norm before each sublayer (pre_norm), but Marian has it behind the sum only",
                        hint="export it as safetensors")
    own = {key: value for key, value in vars(config).items() if key not in ("pre_norm", "label_smoothing")}
    return {**own, "decoder_vocab_size": config.target_vocab_size, "encoder_ffn_dim": config.inner("encoder"),
            "decoder_ffn_dim": config.inner("decoder"), "init_std": config.init_std or TranslationConfig.init_std,
            "static_position_embeddings": True, "is_encoder_decoder": True, "bos_token_id": None}


def _check_ties(config: TranslationConfig) -> None:
    if config.share_encoder_decoder_embeddings and not config.tie_word_embeddings:
        raise UserError("the embeddings of source and target are one, but the head has weights of its own, which "
                        "versions of Marian read differently",
                        hint="make share_encoder_decoder_embeddings and tie_word_embeddings equal")


# (ours, theirs) below a layer, without .weight and .bias; in Hugging Face's order.
_PROJECTIONS = (("key", "k_proj"), ("value", "v_proj"), ("query", "q_proj"), ("output", "out_proj"))
_MLP = (("expand", "fc1"), ("contract", "fc2"), ("norm", "final_layer_norm"))
_SOURCE, _TARGET = "encoder0.attention.embeddings.token.weight", "decoder0.attention.embeddings.token.weight"


def _attention_names(theirs: str) -> Names:
    return (*((our, f"{theirs}.{their}") for our, their in _PROJECTIONS), ("norm", f"{theirs}_layer_norm"))


def huggingface_names(config: Mapping[str, object]) -> dict[str, str]:
    """Map Hugging Face's names of the weights to ours; ``config`` holds the keys of a ``MarianConfig``."""
    names = {"final_logits_bias": "head.logits_bias"}
    if config["share_encoder_decoder_embeddings"]:
        names |= {"model.shared.weight": _SOURCE}
    else:
        names |= {"model.encoder.embed_tokens.weight": _SOURCE, "model.decoder.embed_tokens.weight": _TARGET}
    for side in ("encoder", "decoder"):
        blocks = config[f"{side}_layers"]
        assert isinstance(blocks, int), "a checked config"
        for block in range(blocks):
            theirs, ours = f"model.{side}.layers.{block}", f"{side}{block}"
            first = f"{ours}.attention" + (".attention" if block == 0 else "")  # it is with the embeddings
            names |= weight_names(theirs, first, _attention_names("self_attn"))
            if side == "decoder":
                names |= weight_names(theirs, f"{ours}.cross_attention", _attention_names("encoder_attn"))
            names |= weight_names(theirs, f"{ours}.mlp", _MLP)
    return names | ({} if config["tie_word_embeddings"] else {"lm_head.weight": "head.decoder.weight"})


def huggingface_copies(config: Mapping[str, object]) -> dict[str, str]:
    """Map the names that some files have for the weights that are shared."""
    shared = config["share_encoder_decoder_embeddings"]
    return {**({"model.encoder.embed_tokens.weight": _SOURCE, "model.decoder.embed_tokens.weight": _SOURCE}
               if shared else {}),
            **({"lm_head.weight": _SOURCE if shared else _TARGET} if config["tie_word_embeddings"] else {})}


def huggingface_spelled(name: str) -> str | None:
    """Return the name of a weight, or None for the positions, which are computed."""
    return None if name.endswith(".embed_positions.weight") else name


def translation(config: TranslationConfig, length: int | None = None) -> Model:
    """Return the Transformer with the loss of the next token of the target.

    Batch fields, all int64: ``source_ids`` and ``source_mask`` (1 = token, 0 = padding) [B, S]; ``target_ids`` [B, T]:
    the start token, then the target but for its last token; ``labels`` [B, T]: the target with its end token, -100
    where padded. S and T may be others in the next batch. The tensors between layers are ``h``, [B, S, H] in the
    encoder and [B, T, H] in the decoder, and the encoder's output ``memory`` [B, S, H], which every layer of attention
    to it reads.

    Args:
        length: tokens for which there are positions; None: as many as the config has.
    """
    tables = partial(TranslationEmbeddings, config, length=length or config.max_position_embeddings)
    self_attention = {side: partial(TranslationAttention, config, getattr(config, f"{side}_attention_heads"),
                                    causal=side == "decoder") for side in ("encoder", "decoder")}
    shared, layers = config.share_encoder_decoder_embeddings, []
    for block in range(config.encoder_layers):
        name, last = f"encoder{block}", block == config.encoder_layers - 1
        layers.append(Layer(f"{name}.attention", partial(
            EmbeddingsAndSelfAttention, partial(tables, config.vocab_size), self_attention["encoder"])
            if block == 0 else self_attention["encoder"], inputs=("source_ids" if block == 0 else "h", "source_mask")))
        layers.append(Layer(f"{name}.mlp", partial(TranslationMlp, config, config.inner("encoder"), last=last),
                            outputs=("memory" if last else "h",)))
    for block in range(config.decoder_layers):
        name = f"decoder{block}"
        layers.append(Layer(f"{name}.attention", partial(
            EmbeddingsAndSelfAttention, partial(tables, config.target_vocab_size), self_attention["decoder"])
            if block == 0 else self_attention["decoder"], inputs=("target_ids" if block == 0 else "h",),
            ties={"embeddings.token.weight": _SOURCE} if shared and block == 0 else {}))
        layers.append(Layer(f"{name}.cross_attention", partial(
            TranslationCrossAttention, config, config.decoder_attention_heads), inputs=("h", "memory", "source_mask")))
        layers.append(Layer(f"{name}.mlp", partial(TranslationMlp, config, config.inner("decoder"))))
    layers.append(Layer("head", partial(TranslationHead, config), inputs=("h", "labels"), outputs=("loss",),
                        ties={"decoder.weight": _TARGET} if config.tie_word_embeddings else {}))
    return Model(layers, batch=("source_ids", "source_mask", "target_ids", "labels"), labels="labels",
                 label_weights=is_label)


def _flops(settings: ModelSettings) -> list[int]:
    """Count the operations of every layer per token, where source and target have as many tokens as each other."""
    config = config_from_settings(settings)
    h, s = config.d_model, settings.sequence_length or config.max_position_embeddings
    norm = 2 * h
    attention = 2 * (norm + 4 * h * h + 4 * h) + 4 * h * s
    encoder, decoder = (2 * (norm + 2 * h * i + i + h) for i in (config.inner("encoder"), config.inner("decoder")))
    finals = 2 * norm if config.pre_norm else 0
    layers = [*(attention, encoder) * config.encoder_layers, *(attention, attention, decoder) * config.decoder_layers,
              2 * config.target_vocab_size * h + finals]
    layers[2 * config.encoder_layers - 1] += finals
    return layers


def _tensor_sizes(settings: ModelSettings) -> dict[str, int]:
    """Return no length: those of sentences are what they are, so that activations between layers are whole."""
    config = config_from_settings(settings)
    return {"vocab_size": config.vocab_size, "decoder_vocab_size": config.target_vocab_size,
            "encoder_attention_heads": config.encoder_attention_heads,
            "decoder_attention_heads": config.decoder_attention_heads,
            "encoder_ffn_dim": config.inner("encoder"), "decoder_ffn_dim": config.inner("decoder")}


@register_model("translation", flops=_flops, tensor_sizes=_tensor_sizes, options=TranslationOptions,
                presets=KEYS.presets, datasets=("pairs",), huggingface=HuggingFace(
    "marian", "MarianMTModel", "PreTrainedTokenizerFast", from_huggingface, huggingface_config, huggingface_names,
    huggingface_copies, huggingface_spelled, special={
        "eos_token": ("</s>", "eos_token_id", "forced_eos_token_id"),
        "pad_token": ("<pad>", "pad_token_id", "decoder_start_token_id")}))
def translation_from_settings(settings: ModelSettings) -> Model:
    """Return the Transformer from a config file's ``model`` section. Raises UserError for sequences beyond its
    positions."""
    config = config_from_settings(settings)
    KEYS.check_length(settings.sequence_length or 1, config.max_position_embeddings, "max_position_embeddings")
    return translation(config, settings.sequence_length)


def sinusoids(length: int, size: int) -> Tensor:
    """Return the positions of Vaswani et al., section 3.5, fp32 [S, H]: first all sines, then all cosines, as Marian.

    They are made on the CPU in fp64: on the meta device torch would import a compiler to compute anything, for seconds.
    """
    divisors = np.array([np.power(10000, 2 * (j // 2) / size) for j in range(size)])
    angles = np.arange(length)[:, None] / divisors
    table = np.concatenate((np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])), axis=1)
    return torch.tensor(table, dtype=torch.float32, device="cpu").to(torch.get_default_device())


class TranslationEmbeddings(nn.Module):
    """Token embeddings + sinusoidal positions: int64 [B, S] -> [B, S, H]."""

    tensor_plan: ClassVar = {"token": tp.vocabulary, "part": tp.part, "dropout": tp.dropout}
    positions_sh: Tensor

    def __init__(self, config: TranslationConfig, vocabulary: int, length: int) -> None:
        super().__init__()
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.token = nn.Embedding(vocabulary, config.d_model)
        nn.init.normal_(self.token.weight, std=config.init_std or config.d_model ** -0.5)
        self.part = nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions_sh", sinusoids(length, config.d_model), persistent=False)

    def forward(self, ids_bs: Tensor, start: int = 0) -> Tensor:
        end = start + ids_bs.shape[1]
        KEYS.check_length(end, len(self.positions_sh), "max_position_embeddings")
        token_bsh = self.token(ids_bs) * self.scale
        position_1sh = self.part(self.positions_sh[None, start:end].to(token_bsh.dtype))
        return self.dropout(token_bsh + position_1sh)  # type: ignore[no-any-return]


class _Sublayer(nn.Module):
    """A sublayer between its norm and its sum, with dropout (Vaswani et al., sections 3.1 and 5.4)."""

    tensor_plan: ClassVar[tp.Plan] = {"norm": tp.norm, "dropout": tp.dropout}

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def _wrapped(self, h_bsh: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return h_bsh + self.dropout(sublayer(self.norm(h_bsh)))  # type: ignore[no-any-return]
        return self.norm(h_bsh + self.dropout(sublayer(h_bsh)))  # type: ignore[no-any-return]


class _Attention(_Sublayer):
    tensor_plan: ClassVar = {**_Sublayer.tensor_plan, "whole": tp.gathered, "query": tp.column, "key": tp.column,
                             "value": tp.column, "attention_dropout": tp.dropout_along(1), "output": tp.row}

    def __init__(self, config: TranslationConfig, heads: int) -> None:
        super().__init__(config)
        self.head_size, size = config.d_model // heads, config.d_model
        self.whole, self.attention_dropout = nn.Identity(), nn.Dropout(config.attention_dropout)
        self.query, self.key, self.value, self.output = (_linear(size, size, config) for _ in range(4))

    def _mixed(self, h_bth: Tensor, read_bsh: Tensor, mask_bs: Tensor | None, causal: bool) -> Tensor:
        """Return, for every token of ``h``, a mixture of the tokens of ``read`` that it sees."""
        whole_bsh = self.whole(read_bsh)
        return self._attended(self._heads(self.query, whole_bsh if h_bth is read_bsh else h_bth),
                              self._heads(self.key, whole_bsh), self._heads(self.value, whole_bsh), mask_bs, causal)

    def _heads(self, projection: nn.Module, tokens_bsh: Tensor) -> Tensor:
        return projection(tokens_bsh).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # type: ignore[no-any-return]

    def _attended(self, query_batd: Tensor, key_basd: Tensor, value_basd: Tensor, mask_bs: Tensor | None,
                  causal: bool) -> Tensor:
        mask = None if mask_bs is None else (mask_bs != 0)[:, None, None, :]
        mixed_batd = attention(query_batd, key_basd, value_basd, mask=mask, causal=causal,
                               dropout=self.attention_dropout)
        return self.output(mixed_batd.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TranslationAttention(_Attention):
    """Self-attention, of the encoder with the mask int64 [B, S], of the decoder causal: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: TranslationConfig, heads: int, causal: bool) -> None:
        super().__init__(config, heads)
        self.causal = causal

    def forward(self, h_bsh: Tensor, mask_bs: Tensor | None = None) -> Tensor:
        return self._wrapped(h_bsh, lambda x_bsh: self._mixed(x_bsh, x_bsh, mask_bs, self.causal))

    def step(self, h_bsh: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the output for new tokens of the decoder."""
        def mixed(x_bsh: Tensor) -> Tensor:
            first = cache.length == 0
            keys_basd, values_basd = cache.append(self._heads(self.key, x_bsh), self._heads(self.value, x_bsh))
            return self._attended(self._heads(self.query, x_bsh), keys_basd, values_basd, None, causal=first)

        return self._wrapped(h_bsh, mixed)


class TranslationCrossAttention(_Attention):
    """Attention to the encoder's output: [B, T, H], [B, S, H] and the mask int64 [B, S] -> [B, T, H]."""

    def forward(self, h_bth: Tensor, memory_bsh: Tensor, mask_bs: Tensor) -> Tensor:
        return self._wrapped(h_bth, lambda x_bth: self._mixed(x_bth, memory_bsh, mask_bs, causal=False))

    def step(self, h_bth: Tensor, memory_bsh: Tensor | None, mask_bs: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the output for new tokens; the encoder's output comes with the first of them."""
        if memory_bsh is not None:
            cache.keep(self._heads(self.key, memory_bsh), self._heads(self.value, memory_bsh))
        return self._wrapped(h_bth, lambda x_bth: self._attended(
            self._heads(self.query, x_bth), *cache.contents(), mask_bs, causal=False))


class EmbeddingsAndSelfAttention(nn.Module):
    """The first layer of encoder or decoder: embeddings and the first block's self-attention."""

    def __init__(self, embeddings: Callable[[], nn.Module], attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embeddings = embeddings()
        self.attention = attention()

    def forward(self, ids_bs: Tensor, mask_bs: Tensor | None = None) -> Tensor:
        return self.attention(self.embeddings(ids_bs), mask_bs)  # type: ignore[no-any-return]

    def step(self, ids_bs: Tensor, cache: KeyValueCache) -> Tensor:
        return self.attention.step(self.embeddings(ids_bs, cache.length), cache)  # type: ignore[operator, no-any-return]


class TranslationMlp(_Sublayer):
    """Expand to I, activation, contract: [B, S, H] -> [B, S, H].

    Args:
        last: of the encoder, where ``pre_norm`` ends with a norm.
    """

    tensor_plan: ClassVar = {**_Sublayer.tensor_plan, "expand": tp.column, "inner_dropout": tp.dropout_along(-1),
                             "contract": tp.row, "final_norm": tp.norm}

    def __init__(self, config: TranslationConfig, inner: int, last: bool = False) -> None:
        super().__init__(config)
        self.activation = config.activation_function
        self.expand, self.contract = _linear(config.d_model, inner, config), _linear(inner, config.d_model, config)
        self.inner_dropout = nn.Dropout(config.activation_dropout)
        self.final_norm = _final_norm(config) if last else nn.Identity()

    def forward(self, h_bsh: Tensor) -> Tensor:
        def mlp(x_bsh: Tensor) -> Tensor:
            inner_bsi = self.inner_dropout(ACTIVATIONS[self.activation](self.expand(x_bsh)))
            return self.contract(inner_bsi)  # type: ignore[no-any-return]

        return self.final_norm(self._wrapped(h_bsh, mlp))  # type: ignore[no-any-return]

    def step(self, h_bsh: Tensor, cache: KeyValueCache) -> Tensor:
        return self(h_bsh)  # type: ignore[no-any-return]


class TranslationHead(nn.Module):
    """The last layer: logits and their loss, [B, T, H] and int64 labels [B, T] -> a scalar.

    In training the labels are smoothed (Szegedy et al. 2016, arXiv:1512.00567); the loss of an evaluation is the plain
    cross entropy. ``logits_bias`` is of files of Marian's; it is 0 otherwise, and not trained.
    """

    tensor_plan: ClassVar = {"norm": tp.gathered, "decoder": tp.scores}
    logits_bias: Tensor

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.label_smoothing = config.label_smoothing
        self.norm = _final_norm(config)
        self.decoder = nn.Linear(config.d_model, config.target_vocab_size, bias=False)
        nn.init.normal_(self.decoder.weight, std=config.init_std or config.d_model ** -0.5)
        self.register_buffer("logits_bias", torch.zeros(1, config.target_vocab_size))

    def scores(self, h_bth: Tensor) -> Tensor:
        """Return the logits [B, T, V] of the next token."""
        scores_btv = self.decoder(self.norm(h_bth))
        return scores_btv + tp.cut_like(self.logits_bias, scores_btv)  # type: ignore[no-any-return]

    def forward(self, h_bth: Tensor, labels_bt: Tensor) -> Tensor:
        return next_token_loss(self.scores(h_bth), labels_bt, self.label_smoothing if self.training else 0.0)


def _final_norm(config: TranslationConfig) -> nn.Module:
    return nn.LayerNorm(config.d_model) if config.pre_norm else nn.Identity()


def _linear(inputs: int, outputs: int, config: TranslationConfig) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    if config.init_std is None:
        nn.init.xavier_uniform_(linear.weight)
    else:
        nn.init.normal_(linear.weight, std=config.init_std)
    nn.init.zeros_(linear.bias)
    return linear
