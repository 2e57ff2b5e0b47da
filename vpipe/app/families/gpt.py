"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") in layers of half a block each.

A layer is norm + attention + add, or norm + MLP + add (pre-norm). The embeddings ride with the first layer. The last
layer is the last norm and the head. So n blocks make 2n + 1 layers. In eval mode the order of operations is that of
Hugging Face's ``GPT2LMHeadModel``.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, a attention heads, d = h / a head size,
i inner size of the MLP, v vocabulary size; 3 = query, key, value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    NextTokenHead,
    attend_causally,
    decoder,
    decoder_copies,
    decoder_names,
    with_carried,
)

KEYS = ConfigKeys(
    "GPT",
    # Radford et al., table 2; the names are those the weights were published under. cpm: the Chinese GPT of Zhang et
    # al. 2020 (arXiv:2012.00413), table 1, whose small and medium have GPT-2's sizes.
    presets={name: {"n_layer": blocks, "n_embd": hidden, "n_head": heads} for name, blocks, hidden, heads in (
        ("small", 12, 768, 12), ("medium", 24, 1024, 16), ("large", 36, 1280, 20), ("xl", 48, 1600, 25),
        ("cpm", 32, 2560, 32))},
    fixed={"model_type": "gpt2", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
           "reorder_and_upcast_attn": False, "add_cross_attention": False, "is_encoder_decoder": False,
           "pruned_heads": {}},
    silent={"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "gradient_checkpointing",
            "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "n_ctx", "task_specific_params",
            "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict", "problem_type",
            "is_decoder", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
            "summary_use_proj"},
    choices={"activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh")})


@dataclass(frozen=True)
class GptConfig(Mixture):
    """The sizes of a GPT under the key names of Hugging Face's ``GPT2Config``, with its defaults but for one.

    The dropouts (``resid`` after a sublayer, ``embd`` after the embeddings, ``attn`` of attention) are probabilities in
    [0, 1). ``n_inner`` is 4 ``n_embd`` where it is None. ``activation_function`` is the exact GELU, ``gelu``, which is
    the fastest, unless a published model has ``gelu_new`` or ``gelu_pytorch_tanh``, its approximation by tanh.
    Raises one UserError naming every value out of range.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: Blocks = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        KEYS.check(self, "n_embd n_head")
        self.check_experts()

    @property
    def inner(self) -> int:
        """Return the width of the MLP."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner


def config_from_settings(settings: ModelSettings) -> GptConfig:
    """Merge the preset, ``overrides`` (the contents of a ``config.json``) and the settings' fields; the later wins.

    A ``config.json`` without an ``activation_function`` means ``gelu_new``. Without ``n_positions`` there are positions
    for as many tokens as a sample has, and for 1,024 at least.
    """
    overrides = {"activation_function": "gelu_new", **settings.overrides} if settings.overrides else {}
    values = KEYS.merge(GptConfig, settings.preset, overrides, {
        "vocab_size": settings.vocab_size, "n_embd": settings.hidden_size, "n_layer": settings.num_layers,
        "n_head": settings.num_heads, "resid_pdrop": settings.dropout, "embd_pdrop": settings.dropout,
        "attn_pdrop": settings.dropout, "tie_word_embeddings": settings.tie_weights, **mixture_from_settings(settings)})
    positions = max(settings.sequence_length or 1, GptConfig.n_positions)
    config = GptConfig(**{"n_positions": positions, **values})
    check_used(settings, config)
    return config


def from_huggingface(found: Mapping[str, object]) -> ModelSettings:
    """Return the settings for a ``config.json``. Missing keys have the defaults of ``GPT2Config``."""
    values: dict[str, Any] = {**vars(GptConfig()), "activation_function": "gelu_new", **found}
    config = config_from_settings(ModelSettings(values["vocab_size"], overrides=values))
    return ModelSettings(config.vocab_size, tie_weights=config.tie_word_embeddings, overrides=values)


def huggingface_config(settings: ModelSettings) -> dict[str, object]:
    """Return every field, and no tokens to begin and end with, which ``transformers`` else takes of GPT-2."""
    return {**config_from_settings(settings).written(), "bos_token_id": None, "eos_token_id": None}


TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Suffixes of the names of matrices that GPT-2 stores as [inputs, outputs]."""

# (ours, theirs) below a layer, without .weight and .bias; in Hugging Face's order.
_ATTENTION = (("norm", "ln_1"), ("qkv", "attn.c_attn"), ("output", "attn.c_proj"))
_MLP = (("norm", "ln_2"), ("expand", "mlp.c_fc"), ("contract", "mlp.c_proj"))


def huggingface_names(config: Mapping[str, object]) -> dict[str, str]:
    """Map Hugging Face's names of the weights to ours; ``config`` holds the keys of a ``GPT2Config``."""
    refuse_experts("GPT2LMHeadModel", config)
    return decoder_names(config, config["n_layer"], "transformer", "h", (("token", "wte"), ("position", "wpe")),
                         _ATTENTION, _MLP, "ln_f")


def huggingface_spelled(name: str) -> str | None:
    """Return today's name of a weight (early files lack the prefix), or None for their masks of attention."""
    if re.search(r"\.attn\.(masked_)?bias$", name):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    # As published files name it: that approximation in the order of operations that they were trained with.
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))}


def gpt(config: GptConfig, packed: bool = False) -> Model:
    """Return GPT with the loss of the next token as 2n + 1 layers for n blocks.

    Args:
        packed: as of :func:`vpipe.app.families.transformer.decoder`.
    """
    return decoder(config.n_layer, partial(GptEmbeddings, config), partial(GptAttention, config),
                   partial(_mlp, config), partial(_head, config), tied=config.tie_word_embeddings, packed=packed,
                   mixture=config)


def _flops(settings: ModelSettings) -> list[int]:
    config = config_from_settings(settings)
    h, i, s = config.n_embd, config.inner, settings.sequence_length or config.n_positions
    norm = 2 * h
    attention = 2 * (norm + 4 * h * h + 4 * h) + 4 * h * s
    expert = 2 * h * i + i + h
    mlp = 2 * (norm + config.uses(expert, h, expert))
    return [*(attention, mlp) * config.n_layer, 2 * (norm + config.vocab_size * h)]


def _tensor_sizes(settings: ModelSettings) -> dict[str, int]:
    config = config_from_settings(settings)
    return {"vocab_size": config.vocab_size, "num_heads": config.n_head, "n_inner": config.inner,
            "sequence_length": settings.sequence_length or config.n_positions}


@register_model("gpt", flops=_flops, tensor_sizes=_tensor_sizes, presets=KEYS.presets, datasets=(
    "code_search_net", "huggingface", "text"), huggingface=HuggingFace(
    "gpt2", "GPT2LMHeadModel", "PreTrainedTokenizerFast", from_huggingface, huggingface_config, huggingface_names,
    decoder_copies, huggingface_spelled, TRANSPOSED))
def gpt_from_settings(settings: ModelSettings) -> Model:
    """Return GPT from a config file's ``model`` section. Raises UserError for a sequence longer than its positions."""
    config = config_from_settings(settings)
    KEYS.check_length(settings.sequence_length or 1, config.n_positions, "n_positions")
    return gpt(config, settings.packed)


class GptEmbeddings(nn.Module):
    """Token + position embeddings: int64 [B, S] -> [B, S, H]."""

    tensor_plan: ClassVar = {"token": tp.vocabulary, "position": tp.table, "part": tp.part, "dropout": tp.dropout}

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.n_positions, config.n_embd)
        self.part = nn.Identity()
        self.dropout = Dropout(config.embd_pdrop)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=config.initializer_range)

    def forward(self, ids_bs: Tensor, positions_bs: Tensor | None = None, start: int = 0) -> Tensor:
        end = start + ids_bs.shape[1]
        KEYS.check_length(end, self.position.num_embeddings, "n_positions")
        table = self.position.weight
        position_bsh = self.part(table[None, start:end] if positions_bs is None else
                                 F.embedding(tp.placed_like(positions_bs, table), table))
        return self.dropout(self.token(ids_bs) + position_bsh)  # type: ignore[no-any-return]

    def step(self, ids_bs: Tensor, cache: KeyValueCache) -> Tensor:
        return self(ids_bs, start=cache.length)  # type: ignore[no-any-return]


class GptAttention(nn.Module):
    """Norm, causal self-attention, add: [B, S, H] -> [B, S, H]."""

    tensor_plan: ClassVar = {"norm": tp.gathered, "qkv": tp.fused(3), "attention_dropout": tp.dropout_along(1),
                             "output": tp.row, "dropout": tp.dropout}

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        size = config.n_embd
        self.head_size = size // config.n_head
        self.attention_dropout = Dropout(config.attn_pdrop, along=2, seen=3)
        self.norm = _norm(config)
        self.qkv = _linear(size, 3 * size, config)
        self.output = _linear(size, size, config, residual=True)
        self.dropout = Dropout(config.resid_pdrop)

    def forward(self, h_bsh: Tensor, positions_bs: Tensor | None = None, cache: KeyValueCache | None = None,
                carried: tuple[Tensor, ...] | None = None) -> Tensor | tuple[Tensor, ...]:
        qkv_bs3ad = self.qkv(self.norm(h_bsh)).unflatten(-1, (3, -1, self.head_size))
        query_basd, key_basd, value_basd = qkv_bs3ad.permute(2, 0, 3, 1, 4)
        mixed_basd, after = attend_causally(query_basd, key_basd, value_basd, positions_bs, cache, carried,
                                            self.attention_dropout)
        mixed_bsh = self.output(mixed_basd.transpose(1, 2).flatten(2))
        return with_carried(h_bsh + self.dropout(mixed_bsh), after)

    def step(self, h_bsh: Tensor, cache: KeyValueCache) -> Tensor:
        return self(h_bsh, cache=cache)  # type: ignore[no-any-return]


class Gelu(PerToken):
    """Norm, if there is one, expand to I, GELU, contract: [..., H] -> [..., H]."""

    tensor_plan: ClassVar = {"expand": tp.plain_columns, "contract": tp.plain_rows}

    def __init__(self, config: GptConfig, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.activation = config.activation_function
        self.norm = nn.Identity() if norm is None else norm
        self.expand = _linear(config.n_embd, config.inner, config)
        self.contract = _linear(config.inner, config.n_embd, config, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(GELU[self.activation](self.expand(self.norm(x))))  # type: ignore[no-any-return]


class GptMlp(Gelu):
    """Norm, expand to I, GELU, contract, add: [B, S, H] -> [B, S, H]."""

    tensor_plan: ClassVar = {"norm": tp.gathered, "expand": tp.column, "contract": tp.row, "dropout": tp.dropout}

    def __init__(self, config: GptConfig) -> None:
        super().__init__(config, _norm(config))
        self.dropout = Dropout(config.resid_pdrop)

    def forward(self, h_bsh: Tensor) -> Tensor:
        return h_bsh + self.dropout(super().forward(h_bsh))  # type: ignore[no-any-return]


def _mlp(config: GptConfig) -> nn.Module:
    if config.num_local_experts is None:
        return GptMlp(config)
    router = nn.Linear(config.n_embd, config.num_local_experts, bias=False)
    nn.init.normal_(router.weight, std=config.initializer_range)
    return Experts(_norm(config), router, (Gelu(config) for _ in range(config.num_local_experts)),
                   Dropout(config.resid_pdrop), per_token=config.num_experts_per_tok,
                   weight=config.router_aux_loss_coef / config.n_layer)


def _norm(config: GptConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


def _head(config: GptConfig) -> NextTokenHead:
    decoder = nn.Linear(config.n_embd, config.vocab_size, bias=False)
    nn.init.normal_(decoder.weight, std=config.initializer_range)
    return NextTokenHead(_norm(config), decoder)


def _linear(inputs: int, outputs: int, config: GptConfig, residual: bool = False) -> nn.Linear:
    """Return a linear layer of GPT's initial weights; the ``residual`` ones join a sum of 2n (section 2.3)."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=config.initializer_range / (math.sqrt(2 * config.n_layer) if residual else 1))
    nn.init.zeros_(linear.bias)
    return linear
