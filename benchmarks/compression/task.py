"""What every system trains: a small GPT over bytes of English prose, cut in two.

B samples, T tokens, D hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Execution, Layer, Model, Pipeline, Transfers

sys.path.insert(0, str(Path(__file__).parent.parent / "throughput"))

from model import HIDDEN, MLP, TOKENS, Attention

BLOCKS, BYTES, SAMPLES, MICROBATCHES = 2, 256, 8, 4
CUT = (BLOCKS + 1, BLOCKS + 1)
"""Half-block layers per stage, with the embedding and the head."""


@dataclass(frozen=True)
class Way:
    """How tensors travel between the two stages."""

    name: str
    compress: str


WAYS = (Way("none", "none"), Way("bf16", "bf16"),
        Way("int8 nearest", "int8"), Way("int8 stochastic", "int8_stochastic"))


class Embed(nn.Module):
    """``ids [B, T] -> h [B, T, D]``."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, HIDDEN)
        self.position = nn.Embedding(TOKENS, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.byte(ids) + self.position.weight


class Head(nn.Module):
    """Mean loss over all tokens: ``h [B, T, D], labels [B, T] -> scalar``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.logits = nn.Linear(HIDDEN, BYTES, bias=False)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.norm(h)).flatten(0, 1), labels.flatten())


def gpt() -> Model:
    """``embed``, 2 x (attention, MLP), ``head``."""
    halves = [Layer(f"block{i}.{half.__name__.lower()}", half) for i in range(BLOCKS) for half in (Attention, MLP)]
    return Model([Layer("embed", Embed, ("ids",)), *halves, Layer("head", Head, ("h", "labels"), ("loss",))],
                 batch=("ids", "labels"))


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """``ids`` and ``labels``, both ``[B, T]``: stretches of Python's help topics, 0.5 MB of connected prose."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - TOKENS, (SAMPLES, 1), generator=generator)
        stretches = text[starts + torch.arange(TOKENS + 1)]
        yield {"ids": stretches[:, :-1].contiguous(), "labels": stretches[:, 1:].contiguous()}


def pipeline(way: Way, seed: int, learning_rate: float = 1e-3) -> Pipeline:
    """Two stages under 1F1B."""
    return Pipeline(gpt(), lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, fused=True), stages=CUT,
                    schedule="1f1b", microbatches=MICROBATCHES, transfers=Transfers(compress=way.compress),
                    execution=Execution("cpu"), seed=seed)
