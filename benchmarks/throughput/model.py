"""The model that every system trains: a small GPT in 18 layers that a pipeline may be cut between.

B samples, T tokens, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model
from vpipe.app.families.transformer import attention

BLOCKS, HIDDEN, HEADS, VOCABULARY, TOKENS = 8, 256, 8, 8192, 128
SEED = 0


class Embed(nn.Module):
    """Token and position embeddings: ``ids [B, T] -> h [B, T, D]``."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(TOKENS, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.word(ids) + self.position.weight[:ids.shape[1]]


class Attention(nn.Module):
    """The first half of a pre-norm block: ``h [B, T, D] -> h [B, T, D]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        qkv_3bhtd = self.qkv(self.norm(h)).unflatten(-1, (3, HEADS, HIDDEN // HEADS)).permute(2, 0, 3, 1, 4)
        mixed_bhtd = attention(*qkv_3bhtd, causal=True)
        return h + self.out(mixed_bhtd.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The second half of a pre-norm block: ``h [B, T, D] -> h [B, T, D]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Head(nn.Module):
    """Final norm and logits; with labels their mean loss: ``h [B, T, D] -> logits [B, T, V]`` or a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.logits = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.logits(self.norm(h))
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over all tokens: ``logits [B, T, V], labels [B, T] -> scalar``."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt() -> Model:
    """``embed``, 8 x (attention, MLP), ``head``: what vpipe cuts."""
    halves = [Layer(f"block{i}.{half.__name__.lower()}", half) for i in range(BLOCKS) for half in (Attention, MLP)]
    return Model([Layer("embed", Embed, ("ids",)), *halves, Layer("head", Head, ("h", "labels"), ("loss",))],
                 batch=("ids", "labels"))


def part(layers: range) -> nn.Sequential:
    """Consecutive layers as a module that starts from the same weights as under vpipe; the head gives logits."""
    model = gpt()
    return nn.Sequential(*(model.layers[i].materialize(i, SEED) for i in layers))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every system."""
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


whole = partial(part, range(2 * BLOCKS + 2))
