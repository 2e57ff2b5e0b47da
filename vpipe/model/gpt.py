"""A decoder with GPT-2's layout (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") in layers
of half a block each.

A layer is norm + attention + add, or norm + MLP + add (pre-norm). The embeddings ride with the first layer, the last
norm and the head are the last, so n blocks make 2n + 1 layers. In eval mode the order of operations is that of Hugging
Face's ``GPT2LMHeadModel``.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, a attention heads, d = h / a head size,
i inner size of the MLP, v vocabulary size; 3 = query, key, value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe.model.attention import attention
from vpipe.model.decoder import decoder
from vpipe.model.gpt_config import GptConfig, config_of, from_huggingface, huggingface_config
from vpipe.model.gpt_names import TRANSPOSED, huggingface_copies, huggingface_names, huggingface_spelled
from vpipe.model.keys import check_length
from vpipe.model.layer import Model
from vpipe.model.loss import next_token_loss
from vpipe.model.registry import HuggingFace, ModelSettings, register_model

GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    # As published files name it: that approximation in the order of operations that they were trained with.
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))}


def gpt(config: GptConfig) -> Model:
    """GPT with the loss of the next token as 2n + 1 layers for n blocks: see :func:`~vpipe.model.decoder.decoder`."""
    return decoder(config.n_layer, partial(EmbeddingsAndAttention, config), partial(Attention, config),
                   partial(Mlp, config), partial(Head, config), tied=config.tie_word_embeddings)


def _flops(settings: ModelSettings) -> list[int]:
    config = config_of(settings)
    h, i, s = config.n_embd, config.inner, settings.sequence_length or config.n_positions
    norm = 2 * h
    attention = 2 * (norm + 4 * h * h + 4 * h) + 4 * h * s
    mlp = 2 * (norm + 2 * h * i + i + h)
    return [*(attention, mlp) * config.n_layer, 2 * (norm + config.vocab_size * h)]


@register_model("gpt", flops=_flops, huggingface=HuggingFace(
    "gpt2", "GPT2LMHeadModel", "PreTrainedTokenizerFast", from_huggingface, huggingface_config, huggingface_names,
    huggingface_copies, huggingface_spelled, TRANSPOSED))
def gpt_from_settings(settings: ModelSettings) -> Model:
    """GPT from a config file's ``model`` section.

    Raises UserError as :func:`config_of`, and for a sequence that is longer than the positions.
    """
    config = config_of(settings)
    check_length("GPT", settings.sequence_length or 1, config.n_positions, "n_positions")
    return gpt(config)


class Embeddings(nn.Module):
    """Token + position embeddings: int64 [B, S] -> [B, S, H]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.n_positions, config.n_embd)
        self.dropout = nn.Dropout(config.embd_pdrop)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=config.initializer_range)

    def forward(self, ids_bs: Tensor) -> Tensor:
        length = ids_bs.shape[1]
        check_length("GPT", length, self.position.num_embeddings, "n_positions")
        return self.dropout(self.token(ids_bs) + self.position.weight[:length])  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Norm, causal self-attention, add: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        size = config.n_embd
        self.heads = config.n_head
        self.attention_dropout = config.attn_pdrop
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_epsilon)
        self.qkv = _linear(size, 3 * size, config)
        self.output = _linear(size, size, config, residual=True)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, h_bsh: Tensor) -> Tensor:
        qkv_bs3ad = self.qkv(self.norm(h_bsh)).unflatten(-1, (3, self.heads, -1))
        query_basd, key_basd, value_basd = qkv_bs3ad.permute(2, 0, 3, 1, 4)
        mixed_basd = attention(query_basd, key_basd, value_basd, causal=True,
                               dropout=self.attention_dropout if self.training else 0.0)
        mixed_bsh = self.output(mixed_basd.transpose(1, 2).flatten(2))
        return h_bsh + self.dropout(mixed_bsh)  # type: ignore[no-any-return]


class EmbeddingsAndAttention(nn.Module):
    """The first layer: embeddings and the first block's attention."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.attention = Attention(config)

    def forward(self, ids_bs: Tensor) -> Tensor:
        return self.attention(self.embeddings(ids_bs))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Norm, expand to I, GELU, contract, add: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.activation = config.activation_function
        self.norm = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.expand = _linear(config.n_embd, config.inner, config)
        self.contract = _linear(config.inner, config.n_embd, config, residual=True)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, h_bsh: Tensor) -> Tensor:
        inner_bsi = GELU[self.activation](self.expand(self.norm(h_bsh)))
        return h_bsh + self.dropout(self.contract(inner_bsi))  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last norm, the scores of every word, and their loss: [B, S, H] and int64 [B, S] -> a scalar."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.decoder = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.decoder.weight, std=config.initializer_range)

    def scores(self, h_bsh: Tensor) -> Tensor:
        """Logits [B, S, V] of the next token."""
        return self.decoder(self.norm(h_bsh))  # type: ignore[no-any-return]

    def forward(self, h_bsh: Tensor, labels_bs: Tensor) -> Tensor:
        return next_token_loss(self.scores(h_bsh), labels_bs)


def _linear(inputs: int, outputs: int, config: GptConfig, residual: bool = False) -> nn.Linear:
    """Weights normal(0, initializer_range), over sqrt(2n) where the output joins one of 2n sums (section 2.3)."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=config.initializer_range / (math.sqrt(2 * config.n_layer) if residual else 1))
    nn.init.zeros_(linear.bias)
    return linear
