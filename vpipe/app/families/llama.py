"""LLaMA (Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288) in layers of half a block each.

A layer is norm + attention + add, or norm + MLP + add, with RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), rotary
positions, heads of keys and values that groups of heads share (Ainslie et al. 2023, arXiv:2305.13245), SwiGLU (Shazeer
2020, arXiv:2002.05202) and no biases. The embeddings ride with the first layer. The last layer is the last norm and the
head. So n blocks make 2n + 1 layers. In eval mode the order of operations is that of Hugging Face's
``LlamaForCausalLM``. Mistral and Qwen are kinds of it, in llama_kinds.py.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, a attention heads, g heads of keys and
values, d head size, i inner size of the MLP, v vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe import Model
from vpipe.app.families import tensor_parallel as tp
from vpipe.app.families.dropout import Dropout
from vpipe.app.families.experts import Experts, Mixture, check_used, mixture_from_settings, refuse_experts
from vpipe.app.families.kv_cache import KeyValueCache, PerToken
from vpipe.app.families.registry import HuggingFace, ModelSettings, register_model
from vpipe.app.families.transformer import (
    Blocks,
    ConfigKeys,
    Names,
    NextTokenHead,
    Positive,
    attend_causally,
    block_weight_names,
    decoder,
    decoder_copies,
    decoder_names,
    start_of,
    with_carried,
)
from vpipe.errors import UserError

LLAMA3 = "llama3"


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3.1's scaling of the rotation for longer contexts: pairs whose wavelength is above
    ``original_max_position_embeddings / low_freq_factor`` positions are ``factor`` times slower, those below
    ``.. / high_freq_factor`` as before, those between in between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @classmethod
    def parse(cls, found: Mapping[str, object] | None) -> RopeScaling | None:
        """Parse ``rope_scaling`` of a ``config.json``; None for no scaling. Raises UserError for another kind."""
        given: dict[str, Any] = dict(found or {})
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        if kind == "default":
            return None
        if kind != LLAMA3:
            raise UserError(f"the rope_type is {kind!r}, but 'default' and '{LLAMA3}' alone are computed here",
                            hint="other kinds change with the length of a sample, or attention too: train without it")
        names = [field.name for field in fields(cls)]
        valid = given.keys() == set(names) and all(
            type(number) in (int, float) and 0 < number < math.inf for number in given.values())
        if not valid or given["high_freq_factor"] <= given["low_freq_factor"]:
            raise UserError(f"the rope_scaling of type '{LLAMA3}' is {given}",
                            hint=f"it must give {', '.join(names)}: numbers above 0, the second below the third")
        return cls(**given)


SILENT = frozenset({
    "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "_name_or_path", "bos_token_id",
    "eos_token_id", "pad_token_id", "is_decoder", "task_specific_params", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "return_dict", "problem_type", "chunk_size_feed_forward", "gradient_checkpointing"})
"""Keys of every kind of LLaMA that do not affect training."""

KEYS = ConfigKeys(
    "LLaMA",
    # 15m and 110m: llama2.c; 135m and 360m: SmolLM2 (arXiv:2502.02737); 1b: TinyLlama (arXiv:2401.02385); 7b, 13b:
    # LLaMA 2. Sizes alone; the small ones share the weights of the word embeddings. Those of LLaMA 3 have its rotation.
    presets={name: {"num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
                    "num_key_value_heads": groups, "tie_word_embeddings": hidden < 2048}
             for name, blocks, hidden, heads, groups in (
                 ("15m", 6, 288, 6, 6), ("110m", 12, 768, 12, 12), ("135m", 30, 576, 9, 3), ("360m", 32, 960, 15, 5),
                 ("1b", 22, 2048, 32, 4), ("7b", 32, 4096, 32, 32), ("13b", 40, 5120, 40, 40))} | {
        name: {"num_hidden_layers": blocks, "hidden_size": hidden, "num_attention_heads": heads,
               "num_key_value_heads": 8, "intermediate_size": inner, "tie_word_embeddings": factor > 8,
               "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
               "rope_scaling": RopeScaling(factor, 1.0, 4.0, 8192)}
        for name, blocks, hidden, heads, inner, factor in (
            ("3.2-1b", 16, 2048, 32, 8192, 32.0), ("3.2-3b", 28, 3072, 24, 8192, 32.0),
            ("3.1-8b", 32, 4096, 32, 14336, 8.0))},
    fixed={"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
           "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {}, "rope_interleaved": False,
           "partial_rotary_factor": 1.0},
    silent=SILENT | {"pretraining_tp", "is_llama_config"})


@dataclass(frozen=True)
class LlamaConfig(Mixture):
    """The sizes of a LLaMA under the key names, and with the defaults, of Hugging Face's ``LlamaConfig``.

    ``intermediate_size`` is 8/3 ``hidden_size``, rounded up to a multiple of 256, where it is None, which gives the
    published sizes; ``num_key_value_heads`` is ``num_attention_heads``, and ``head_dim`` is ``hidden_size`` divided by
    that. Raises UserError for values out of range.

    A subclass is another kind of LLaMA, with a name, keys and sizes of its own.

    Attributes:
        keys: of its configs.
        architecture: its class in ``transformers``.
        absent: what keys that a ``config.json`` lacks mean there, where it is not the default here.
        spelled: further names of keys -> the names here.
        biased: queries, keys and values have biases.
        normed: queries and keys are divided by their root mean square, head by head.
        width: name of the width of the MLP.
        experts: names of the router, and of an expert's gate, up and down, in ``transformers``; None for a kind that it
            does not have with experts.
    """

    keys: ClassVar[ConfigKeys] = KEYS
    architecture: ClassVar[str] = "LlamaForCausalLM"
    absent: ClassVar[Mapping[str, object]] = {"intermediate_size": 11008}
    spelled: ClassVar[Mapping[str, str]] = {}
    biased: ClassVar[bool] = False
    normed: ClassVar[bool] = False
    width: ClassVar[str] = "intermediate_size"
    experts: ClassVar[tuple[str, str, str, str] | None] = None

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int | None = None
    num_hidden_layers: Blocks = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        self.keys.check(self, "hidden_size num_attention_heads")
        self.check_experts()
        if self.num_attention_heads % self.groups:
            raise UserError(f"{self.keys.family}'s {self.groups} heads of keys and values do not divide its "
                            f"{self.num_attention_heads} attention heads",
                            hint="choose a num_kv_heads (num_key_value_heads) that does")
        if self.head_size % 2:
            why = "" if self.head_dim else f" (hidden_size {self.hidden_size} / {self.num_attention_heads} heads)"
            raise UserError(f"{self.keys.family}'s head size is {self.head_size}{why}, but rotary positions turn pairs "
                            "of features", hint="choose a number of heads that makes it even")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def groups(self) -> int:
        """Return the number of heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def inner(self) -> int:
        """Return the width of the MLP."""
        return -(-8 * self.hidden_size // 3 // 256) * 256 if self.intermediate_size is None else self.intermediate_size


def config_from_settings(of: type[LlamaConfig], settings: ModelSettings) -> LlamaConfig:
    """Merge the preset, ``overrides`` (the contents of a ``config.json``) and the settings' fields; the later wins.

    ``num_heads`` without ``num_kv_heads`` gives every head keys of its own. Without ``max_position_embeddings`` there
    are positions for as many tokens as a sample has, and for 2,048 at least.
    """
    overrides = _respelled(of, settings.overrides)
    found = overrides.pop("rope_parameters", None) or overrides.pop("rope_scaling", None) or {}
    if not isinstance(found, Mapping):
        raise UserError(f"rope_scaling is {found!r}", hint="it must be null, or give the rope_type and its numbers")
    rope = dict(found)
    if (theta := rope.pop("rope_theta", None)) is not None:
        overrides["rope_theta"] = theta
    if rope:
        overrides["rope_scaling"] = RopeScaling.parse(rope)
    others = {str(kind) for kind in overrides.pop("layer_types", None) or ()} - {"full_attention"}
    if others:
        raise UserError(f"layer_types has {', '.join(sorted(others))}, but this {of.keys.family} computes "
                        "full_attention only", hint="train a model whose layers all see all earlier tokens")
    values = of.keys.merge(of, settings.preset, overrides, {
        "vocab_size": settings.vocab_size, "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers, "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads or settings.num_heads, "attention_dropout": settings.dropout,
        "tie_word_embeddings": settings.tie_weights, **mixture_from_settings(settings)})
    positions = max(settings.sequence_length or 1, LlamaConfig.max_position_embeddings)
    config = of(**{"max_position_embeddings": positions, **values})
    check_used(settings, config)
    return config


def _respelled(of: type[LlamaConfig], found: Mapping[str, object]) -> dict[str, Any]:
    values = dict(found)
    for other in of.spelled.keys() & values.keys():
        name, value = of.spelled[other], values.pop(other)
        if values.setdefault(name, value) != value:
            raise UserError(f"'{other}' is {value!r}, but '{name}' is {values[name]!r}",
                            hint=f"leave out one of the two: they are names of the same key of {of.keys.family}")
    return values


def from_huggingface(of: type[LlamaConfig], found: Mapping[str, object]) -> ModelSettings:
    """Return the settings for a ``config.json``. Missing keys have the defaults of ``transformers``."""
    values: dict[str, Any] = {**vars(of()), **of.absent, **_respelled(of, found)}
    config = config_from_settings(of, ModelSettings(values["vocab_size"], overrides=values))
    return ModelSettings(config.vocab_size, tie_weights=config.tie_word_embeddings, overrides=values)


def huggingface_config(of: type[LlamaConfig], settings: ModelSettings) -> dict[str, object]:
    """Return every field, and no tokens to begin and end with, which ``transformers`` else takes of LLaMA."""
    config = config_from_settings(of, settings)
    computed = {key: of.keys.fixed[key] for key in ("hidden_act", *of.absent) if key in of.keys.fixed}
    return {**config.written(), **computed, "intermediate_size": config.inner, "num_key_value_heads": config.groups,
            "head_dim": config.head_size, "bos_token_id": None, "eos_token_id": None,
            "rope_scaling": config.rope_scaling and {"rope_type": LLAMA3, **vars(config.rope_scaling)}}


# (ours, theirs) below a layer, without .weight; in Hugging Face's order.
_ATTENTION = (("query", "self_attn.q_proj"), ("key", "self_attn.k_proj"), ("value", "self_attn.v_proj"),
              ("output", "self_attn.o_proj"), ("norm", "input_layernorm"))
_BIASED = _ATTENTION[:3]
_NORMED = (("query_norm", "self_attn.q_norm"), ("key_norm", "self_attn.k_norm"))
_MLP = (("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj"),
        ("norm", "post_attention_layernorm"))


def huggingface_names(of: type[LlamaConfig], config: Mapping[str, object]) -> dict[str, str]:
    """Map Hugging Face's names of the weights to ours; ``config`` holds the keys of a ``LlamaConfig``."""
    blocks = config["num_hidden_layers"]
    mlp: Names = _MLP
    if of.experts is None:
        refuse_experts(of.architecture, config)
    else:
        router, *parts = of.experts
        experts = config["num_local_experts"]
        assert isinstance(experts, int), "a checked config"
        mlp = (*_MLP[3:], ("router", router), *(
            (f"experts.{number}.{ours}", theirs.format(number)) for number in range(experts)
            for (ours, _), theirs in zip(_MLP[:3], parts, strict=True)))
    biases = block_weight_names("model.layers", blocks, _BIASED, (), ("bias",)) if of.biased else {}
    return biases | decoder_names(config, blocks, "model", "layers", (("token", "embed_tokens"),),
                                  _ATTENTION + (_NORMED if of.normed else ()), mlp, "norm", ("weight",))


def huggingface_spelled(name: str) -> str | None:
    """Return today's name of a weight, or None for the rotary frequencies of older files, which are computed."""
    return None if name.endswith(".rotary_emb.inv_freq") else name


def llama(config: LlamaConfig, length: int | None = None, packed: bool = False) -> Model:
    """Return LLaMA with the loss of the next token as 2n + 1 layers for n blocks.

    Each attention layer keeps the rotary tables for ``length`` tokens; None for as many as there are positions.
    ``packed``: as of :func:`vpipe.app.families.transformer.decoder`.
    """
    positions = config.max_position_embeddings if length is None else length
    return decoder(config.num_hidden_layers, partial(LlamaEmbeddings, config),
                   partial(LlamaAttention, config, positions), partial(_mlp, config), partial(_head, config),
                   tied=config.tie_word_embeddings, packed=packed, mixture=config)


def _flops(of: type[LlamaConfig], settings: ModelSettings) -> list[int]:
    config = config_from_settings(of, settings)
    h, i, s, d = config.hidden_size, config.inner, settings.sequence_length or config.max_position_embeddings, \
        config.head_size
    heads, groups = config.num_attention_heads * d, config.groups * d
    weights = h + 2 * h * heads + 2 * h * groups + (heads + 2 * groups) * of.biased + 2 * d * of.normed
    return [*(2 * weights + 4 * heads * s, 2 * (h + config.uses(3 * h * i, h, 3 * h * i))) * config.num_hidden_layers,
            2 * (h + config.vocab_size * h)]


def _tensor_sizes(of: type[LlamaConfig], settings: ModelSettings) -> dict[str, int]:
    config = config_from_settings(of, settings)
    return {"vocab_size": config.vocab_size, "num_heads": config.num_attention_heads, "num_kv_heads": config.groups,
            config.width: config.inner, "sequence_length": settings.sequence_length or config.max_position_embeddings}


def register_kind(of: type[LlamaConfig]) -> type[LlamaConfig]:
    """Register a kind of LLaMA under its ``model_type`` at Hugging Face."""
    name = str(of.keys.fixed["model_type"])

    @register_model(
        name, flops=partial(_flops, of), tensor_sizes=partial(_tensor_sizes, of), presets=of.keys.presets,
        datasets=("code_search_net", "huggingface", "text"), huggingface=HuggingFace(
            name, of.architecture, "PreTrainedTokenizerFast", partial(from_huggingface, of),
            partial(huggingface_config, of), partial(huggingface_names, of), decoder_copies, huggingface_spelled))
    def from_settings(settings: ModelSettings) -> Model:
        config = config_from_settings(of, settings)
        of.keys.check_length(settings.sequence_length or 1, config.max_position_embeddings, "max_position_embeddings")
        return llama(config, settings.sequence_length, settings.packed)

    return of


register_kind(LlamaConfig)


class LlamaRMSNorm(nn.Module):
    """Divide by the root mean square, multiply with a weight: [B, S, H] -> [B, S, H], in the dtype of the input."""

    def __init__(self, config: LlamaConfig, size: int | None = None) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size if size is None else size))

    def forward(self, h_bsh: Tensor) -> Tensor:
        return F.rms_norm(h_bsh, self.weight.shape, self.weight.to(h_bsh.dtype), self.eps)


def rotary_tables(length: int, head_size: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions (Su et al. 2021, arXiv:2104.09864), as Hugging Face has them.

    Feature j of a head and feature j + d/2 make a pair, which is turned by (position * theta^(-2j/d)). The tables are
    fp32 [S, D/2], made on the CPU: on the meta device torch would import a compiler to compute anything, for seconds.
    """
    device = torch.get_default_device()
    pairs = torch.arange(0, head_size, 2, dtype=torch.float, device="cpu")
    turns = 1.0 / theta ** (pairs / head_size)  # radians per position
    if scaling is not None:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        wavelengths = scaling.original_max_position_embeddings / (2 * math.pi / turns)
        kept = ((wavelengths - low) / (high - low)).clamp(0, 1)
        turns = (1 - kept) * turns / scaling.factor + kept * turns
    angles = torch.arange(length, dtype=torch.float, device="cpu")[:, None] * turns
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x_basd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Turn queries or keys by their positions; the tables are [S, D/2], or [B, 1, S, D/2] where samples have tables of
    their own, and take the dtype of ``x``."""
    cos_sd, sin_sd = cos_sd.to(x_basd.dtype), sin_sd.to(x_basd.dtype)
    first, second = x_basd.chunk(2, dim=-1)
    return torch.cat((first * cos_sd - second * sin_sd, second * cos_sd + first * sin_sd), dim=-1)


class LlamaEmbeddings(PerToken):
    """Word embeddings: int64 [B, S] -> [B, S, H]."""

    tensor_plan: ClassVar = {"token": tp.vocabulary}

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.token.weight, std=config.initializer_range)

    def forward(self, ids_bs: Tensor, positions_bs: Tensor | None = None, start: int = 0) -> Tensor:
        return self.token(ids_bs)  # type: ignore[no-any-return]


class LlamaAttention(nn.Module):
    """Norm, causal self-attention with rotary positions, add: [B, S, H] -> [B, S, H]."""

    tensor_plan: ClassVar = {"norm": tp.gathered, "query": tp.column, "key": tp.column, "value": tp.column,
                             "query_norm": tp.norm_along(2), "key_norm": tp.norm_along(2),
                             "attention_dropout": tp.dropout_along(1), "output": tp.row}
    cos_sd: Tensor
    sin_sd: Tensor

    def __init__(self, config: LlamaConfig, positions: int) -> None:
        super().__init__()
        size, self.head_size, self.kind = config.hidden_size, config.head_size, type(config)
        heads, groups = config.num_attention_heads * self.head_size, config.groups * self.head_size
        self.attention_dropout = Dropout(config.attention_dropout, along=2, seen=3)
        self.norm = LlamaRMSNorm(config)
        self.query = _linear(size, heads, config, config.biased)
        self.key = _linear(size, groups, config, config.biased)
        self.value = _linear(size, groups, config, config.biased)
        self.query_norm, self.key_norm = (LlamaRMSNorm(config, self.head_size) if config.normed else nn.Identity()
                                          for _ in range(2))
        self.output = _linear(heads, size, config)
        tables = rotary_tables(positions, self.head_size, config.rope_theta, config.rope_scaling)
        for name, table in zip(("cos_sd", "sin_sd"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, h_bsh: Tensor, positions_bs: Tensor | None = None, cache: KeyValueCache | None = None,
                carried: tuple[Tensor, ...] | None = None) -> Tensor | tuple[Tensor, ...]:
        start, normed_bsh = start_of(cache, carried), self.norm(h_bsh)
        end = start + normed_bsh.shape[1]
        self.kind.keys.check_length(end, len(self.cos_sd), "max_position_embeddings")
        query_bsad, key_bsgd, value_bsgd = (projection(normed_bsh).unflatten(-1, (-1, self.head_size))
                                            for projection in (self.query, self.key, self.value))
        query_basd, key_bgsd, value_bgsd = (x.transpose(1, 2) for x in (
            self.query_norm(query_bsad), self.key_norm(key_bsgd), value_bsgd))
        cos_sd, sin_sd = (table[start:end] if positions_bs is None else table[positions_bs][:, None]
                          for table in (self.cos_sd, self.sin_sd))
        query_basd, key_bgsd = rotate(query_basd, cos_sd, sin_sd), rotate(key_bgsd, cos_sd, sin_sd)
        mixed_basd, after = attend_causally(query_basd, key_bgsd, value_bgsd, positions_bs, cache, carried,
                                            self.attention_dropout)
        return with_carried(h_bsh + self.output(mixed_basd.transpose(1, 2).flatten(2)), after)

    def step(self, h_bsh: Tensor, cache: KeyValueCache) -> Tensor:
        return self(h_bsh, cache=cache)  # type: ignore[no-any-return]


class SwiGlu(PerToken):
    """Norm, if there is one, and SwiGLU: [..., H] -> [..., H]."""

    tensor_plan: ClassVar = {"gate": tp.plain_columns, "up": tp.plain_columns, "down": tp.plain_rows}

    def __init__(self, config: LlamaConfig, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.gate = _linear(config.hidden_size, config.inner, config)
        self.up = _linear(config.hidden_size, config.inner, config)
        self.down = _linear(config.inner, config.hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.down(F.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]


class LlamaMlp(SwiGlu):
    """Norm, SwiGLU, add: [B, S, H] -> [B, S, H]."""

    tensor_plan: ClassVar = {"norm": tp.gathered, "gate": tp.column, "up": tp.column, "down": tp.row}

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, LlamaRMSNorm(config))

    def forward(self, h_bsh: Tensor) -> Tensor:
        return h_bsh + super().forward(h_bsh)


def _mlp(config: LlamaConfig) -> nn.Module:
    if config.num_local_experts is None:
        return LlamaMlp(config)
    return Experts(LlamaRMSNorm(config), _linear(config.hidden_size, config.num_local_experts, config),
                   (SwiGlu(config) for _ in range(config.num_local_experts)), nn.Identity(),
                   per_token=config.num_experts_per_tok, weight=config.router_aux_loss_coef / config.num_hidden_layers,
                   sum_to_one=getattr(config, "norm_topk_prob", True))


def _head(config: LlamaConfig) -> NextTokenHead:
    return NextTokenHead(LlamaRMSNorm(config), _linear(config.hidden_size, config.vocab_size, config))


def _linear(inputs: int, outputs: int, config: LlamaConfig, biased: bool = False) -> nn.Linear:
    """Return a linear layer with weights normal(0, initializer_range), and no bias or one of zeros."""
    linear = nn.Linear(inputs, outputs, bias=biased)
    nn.init.normal_(linear.weight, std=config.initializer_range)
    if biased:
        nn.init.zeros_(linear.bias)
    return linear
