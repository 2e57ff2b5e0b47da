"""Parts that the transformer families share: attention, and the layers of a decoder.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, a attention heads, g heads of keys and
values, d head size, v vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe.model.layer import LOSS, Layer, Model

NO_LABEL = -100
"""Label of a token after which there is none to learn."""


def next_token_loss(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Return the mean cross entropy over the tokens with a label; without any it is 0, not nan.

    In fp32 at least: a sum over V exponentials loses too much in half precision.

    Args:
        logits_bsv: scores [B, S, V].
        labels_bs: int64 [B, S]: the next token, already shifted; :data:`NO_LABEL` where there is none.
    """
    precision = torch.promote_types(logits_bsv.dtype, torch.float32)
    total = F.cross_entropy(logits_bsv.to(precision).flatten(0, 1), labels_bs.flatten(), ignore_index=NO_LABEL,
                            reduction="sum")
    return total / (labels_bs != NO_LABEL).sum().clamp(min=1)


def attention(query_basd: Tensor, key_bgsd: Tensor, value_bgsd: Tensor, *, mask: Tensor | None = None,
              causal: bool = False, dropout: float = 0.0) -> Tensor:
    """Return scaled dot-product attention, [B, A, S, D] in the dtype of the input.

    On the CPU it computes in fp32 at least: torch's backward in bf16 takes three times as long there (8.7 against 2.7
    ms at A 8, S 128, D 32, batch 4, on a core of a Zen 4).

    Args:
        key_bgsd, value_bgsd: of G heads, which divides A: groups of A / G heads share them.
        mask: bool, broadcast to [B, A, S, S]: True where a token is seen.
        causal: a token sees itself and those before it.
        dropout: share of the weights that is dropped.
    """
    grouped = key_bgsd.shape[1] < query_basd.shape[1]
    if query_basd.device.type == "cpu" and query_basd.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", enabled=False):
            mixed_basd = F.scaled_dot_product_attention(
                query_basd.float(), key_bgsd.float(), value_bgsd.float(), attn_mask=mask, dropout_p=dropout,
                is_causal=causal, enable_gqa=grouped)
        return mixed_basd.to(query_basd.dtype)
    return F.scaled_dot_product_attention(query_basd, key_bgsd, value_bgsd, attn_mask=mask, dropout_p=dropout,
                                          is_causal=causal, enable_gqa=grouped)


class EmbeddingsAndAttention(nn.Module):
    """The first layer of a decoder: embeddings and the first block's attention, int64 [B, S] -> [B, S, H]."""

    def __init__(self, embeddings: Callable[[], nn.Module], attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embeddings = embeddings()
        self.attention = attention()

    def forward(self, ids_bs: Tensor) -> Tensor:
        return self.attention(self.embeddings(ids_bs))  # type: ignore[no-any-return]


class NextTokenHead(nn.Module):
    """The last layer of a decoder: norm, logits and their loss, [B, S, H] and int64 labels [B, S] -> a scalar."""

    def __init__(self, norm: nn.Module, decoder: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.decoder = decoder

    def scores(self, h_bsh: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the next token."""
        return self.decoder(self.norm(h_bsh))  # type: ignore[no-any-return]

    def forward(self, h_bsh: Tensor, labels_bs: Tensor) -> Tensor:
        return next_token_loss(self.scores(h_bsh), labels_bs)


def decoder(blocks: int, embeddings: Callable[[], nn.Module], attention: Callable[[], nn.Module],
            mlp: Callable[[], nn.Module], head: Callable[[], nn.Module], *, tied: bool) -> Model:
    """Return a decoder of 2n + 1 layers for n blocks, from the functions that build each part.

    Batch fields, int64 [B, S]: ``input_ids``, and ``labels``: for every token the next one; -100 where there
    is none to learn. The only tensor between layers is ``h`` [B, S, H].

    Args:
        tied: whether the head shares the token embeddings' weight.
    """
    layers = [Layer("block0.attention", partial(EmbeddingsAndAttention, embeddings, attention), inputs=("input_ids",))]
    for i in range(blocks):
        if i > 0:
            layers.append(Layer(f"block{i}.attention", attention))
        layers.append(Layer(f"block{i}.mlp", mlp))
    ties = {"decoder.weight": "block0.attention.embeddings.token.weight"} if tied else {}
    layers.append(Layer("head", head, inputs=("h", "labels"), outputs=(LOSS,), ties=ties))
    return Model(layers, batch=("input_ids", "labels"))
