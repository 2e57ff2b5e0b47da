"""Parts that the transformer families share: attention, and the list of layers of a decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe.model.layer import LOSS, Layer, Model


def attention(query_basd: Tensor, key_bgsd: Tensor, value_bgsd: Tensor, *, mask: Tensor | None = None,
              causal: bool = False, dropout: float = 0.0) -> Tensor:
    """Scaled dot products, softmax, mix: [B, A, S, D] in the kind of numbers that comes in.

    On the CPU in fp32 at least: torch's backward of it in bf16 takes three times as long there (8.7 against 2.7 ms at
    A 8, S 128, D 32, batch 4, on a core of a Zen 4).

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


def decoder(blocks: int, first: Callable[[], nn.Module], attention: Callable[[], nn.Module],
            mlp: Callable[[], nn.Module], head: Callable[[], nn.Module], *, tied: bool) -> Model:
    """2n + 1 layers for n blocks, from what builds each.

    Batch fields, int64 [B, S]: ``input_ids``, and ``labels``, of every token the one that follows it; -100 where there
    is none to learn. The only tensor between layers is ``h`` [B, S, H].

    Args:
        first: embeddings and the first block's attention.
        tied: whether the head shares the token embeddings' weight.
    """
    layers = [Layer("block0.attention", first, inputs=("input_ids",))]
    for i in range(blocks):
        if i > 0:
            layers.append(Layer(f"block{i}.attention", attention))
        layers.append(Layer(f"block{i}.mlp", mlp))
    ties = {"decoder.weight": "block0.attention.embeddings.token.weight"} if tied else {}
    layers.append(Layer("head", head, inputs=("h", "labels"), outputs=(LOSS,), ties=ties))
    return Model(layers, batch=("input_ids", "labels"))
