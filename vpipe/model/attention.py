"""Attention as every family here computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
