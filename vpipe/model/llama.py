"""A decoder as LLaMA has it (Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288) in layers of half a block.

A layer is norm + attention + add, or norm + MLP + add, with RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), rotary
positions, heads of keys and values that groups of heads share (Ainslie et al. 2023, arXiv:2305.13245), SwiGLU (Shazeer
2020, arXiv:2002.05202) and no biases. The embeddings ride with the first layer, the last norm and the head are the
last, so n blocks make 2n + 1 layers. In eval mode the order of operations is that of Hugging Face's
``LlamaForCausalLM``.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, a attention heads, g heads of keys and
values, d = h / a head size, i inner size of the MLP, v vocabulary size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe.model.attention import attention
from vpipe.model.decoder import decoder
from vpipe.model.keys import check_length
from vpipe.model.layer import Model
from vpipe.model.llama_config import LlamaConfig, config_of, from_huggingface, huggingface_config
from vpipe.model.llama_names import huggingface_copies, huggingface_names, huggingface_spelled
from vpipe.model.loss import next_token_loss
from vpipe.model.registry import HuggingFace, ModelSettings, register_model
from vpipe.model.rotary import rotary_tables, rotate


def llama(config: LlamaConfig, length: int | None = None) -> Model:
    """LLaMA with the loss of the next token as 2n + 1 layers for n blocks: see :func:`~vpipe.model.decoder.decoder`.

    Args:
        length: tokens of the longest sample, for which each attention layer keeps the rotary tables; None for as many
            as there are positions.
    """
    positions = config.max_position_embeddings if length is None else length
    return decoder(config.num_hidden_layers, partial(EmbeddingsAndAttention, config, positions),
                   partial(Attention, config, positions), partial(Mlp, config), partial(Head, config),
                   tied=config.tie_word_embeddings)


def _flops(settings: ModelSettings) -> list[int]:
    config = config_of(settings)
    h, i, s = config.hidden_size, config.inner, settings.sequence_length or config.max_position_embeddings
    attention = 2 * (h + 2 * h * h + 2 * h * config.groups * config.head_size) + 4 * h * s
    mlp = 2 * (h + 3 * h * i)
    return [*(attention, mlp) * config.num_hidden_layers, 2 * (h + config.vocab_size * h)]


@register_model("llama", flops=_flops, huggingface=HuggingFace(
    "llama", "LlamaForCausalLM", "PreTrainedTokenizerFast", from_huggingface, huggingface_config, huggingface_names,
    huggingface_copies, huggingface_spelled))
def llama_from_settings(settings: ModelSettings) -> Model:
    """LLaMA from a config file's ``model`` section.

    Raises UserError as :func:`config_of`, and for a sequence that is longer than the positions.
    """
    config = config_of(settings)
    check_length("LLaMA", settings.sequence_length or 1, config.max_position_embeddings, "max_position_embeddings")
    return llama(config, settings.sequence_length)


class Norm(nn.Module):
    """Over the root mean square, times a weight: [B, S, H] -> [B, S, H], in the kind of numbers that comes in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, h_bsh: Tensor) -> Tensor:
        return F.rms_norm(h_bsh, self.weight.shape, self.weight.to(h_bsh.dtype), self.eps)


class Embeddings(nn.Module):
    """Word embeddings: int64 [B, S] -> [B, S, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.token.weight, std=config.initializer_range)

    def forward(self, ids_bs: Tensor) -> Tensor:
        return self.token(ids_bs)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Norm, causal self-attention with rotary positions, add: [B, S, H] -> [B, S, H]."""

    cos_sd: Tensor
    sin_sd: Tensor

    def __init__(self, config: LlamaConfig, positions: int) -> None:
        super().__init__()
        size, self.head_size = config.hidden_size, config.head_size
        self.attention_dropout = config.attention_dropout
        self.norm = Norm(config)
        self.query = _linear(size, size, config)
        self.key = _linear(size, config.groups * self.head_size, config)
        self.value = _linear(size, config.groups * self.head_size, config)
        self.output = _linear(size, size, config)
        tables = rotary_tables(positions, self.head_size, config.rope_theta, config.rope_scaling)
        for name, table in zip(("cos_sd", "sin_sd"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, h_bsh: Tensor) -> Tensor:
        length, normed_bsh = h_bsh.shape[1], self.norm(h_bsh)
        check_length("LLaMA", length, len(self.cos_sd), "max_position_embeddings")
        query_basd, key_bgsd, value_bgsd = (projection(normed_bsh).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
                                            for projection in (self.query, self.key, self.value))
        cos_sd, sin_sd = self.cos_sd[:length], self.sin_sd[:length]
        mixed_basd = attention(rotate(query_basd, cos_sd, sin_sd), rotate(key_bgsd, cos_sd, sin_sd), value_bgsd,
                               causal=True, dropout=self.attention_dropout if self.training else 0.0)
        return h_bsh + self.output(mixed_basd.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class EmbeddingsAndAttention(nn.Module):
    """The first layer: embeddings and the first block's attention."""

    def __init__(self, config: LlamaConfig, positions: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.attention = Attention(config, positions)

    def forward(self, ids_bs: Tensor) -> Tensor:
        return self.attention(self.embeddings(ids_bs))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Norm, SwiGLU, add: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.gate = _linear(config.hidden_size, config.inner, config)
        self.up = _linear(config.hidden_size, config.inner, config)
        self.down = _linear(config.inner, config.hidden_size, config)

    def forward(self, h_bsh: Tensor) -> Tensor:
        normed_bsh = self.norm(h_bsh)
        inner_bsi = F.silu(self.gate(normed_bsh)) * self.up(normed_bsh)
        return h_bsh + self.down(inner_bsi)  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last norm, the scores of every word, and their loss: [B, S, H] and int64 [B, S] -> a scalar."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.decoder = _linear(config.hidden_size, config.vocab_size, config)

    def scores(self, h_bsh: Tensor) -> Tensor:
        """Logits [B, S, V] of the next token."""
        return self.decoder(self.norm(h_bsh))  # type: ignore[no-any-return]

    def forward(self, h_bsh: Tensor, labels_bs: Tensor) -> Tensor:
        return next_token_loss(self.scores(h_bsh), labels_bs)


def _linear(inputs: int, outputs: int, config: LlamaConfig) -> nn.Linear:
    """Weights normal(0, initializer_range), and no bias."""
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=config.initializer_range)
    return linear
