"""Small models that have what pipelines get wrong: dropout, skips, ties, masks, raw parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model

WORDS, WIDTH, CLASSES = 23, 12, 5


class Embed(nn.Module):
    """ids [B,S] int64 -> hidden [B,S,H], a skip [B,S,H] read far later, a mask [B,S] bool (no gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.word(ids)
        return hidden, hidden * 0.5, ids > 3


class RawMatmul(nn.Module):
    """x @ self.w on the raw parameter: what breaks when a version is swapped behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(torch.tanh(hidden @ self.w), 0.2, self.training)


class Mixed(nn.Module):
    """Reads the skip and the mask; passes nothing of them on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
        mixed = self.norm(hidden + self.linear(skip * hidden))
        return F.dropout(mixed.masked_fill(~mask[..., None], 0.0), 0.1, self.training)


class Head(nn.Module):
    """Scores over the words, tied to the embedding, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.decoder(hidden).flatten(0, 1), labels.flatten())


def rich_model(tied: bool = True) -> Model:
    """Eight layers: embedding with a skip and a mask, raw matmuls, skip readers, a tied head."""
    return Model([
        Layer("embed", Embed, ("ids",), ("h", "skip", "mask")),
        Layer("raw0", RawMatmul),
        Layer("mix0", Mixed, ("h", "skip", "mask"), ("h",)),
        Layer("raw1", RawMatmul),
        Layer("mix1", Mixed, ("h", "skip", "mask"), ("h",)),
        Layer("raw2", RawMatmul),
        Layer("mix2", Mixed, ("h", "skip", "mask"), ("h",)),
        Layer("head", Head, ("h", "labels"), ("loss",), ties={"decoder.weight": "embed.word.weight"} if tied else {}),
    ], batch=("ids", "labels"))


def rich_batches(batches: int, samples: int, seed: int = 3, lengths: tuple[int, ...] = (6,)) -> list[dict[str, Tensor]]:
    """Random batches; ``lengths`` are taken in turn, so shapes may change from batch to batch."""
    random = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(WORDS, (samples, length), generator=random)

    return [{"ids": ids(lengths[i % len(lengths)]), "labels": ids(lengths[i % len(lengths)])} for i in range(batches)]


def plain_sequential() -> Model:
    """An ``nn.Sequential`` of one's own."""
    torch.manual_seed(5)
    return Model.sequential(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Tanh(),
                                          nn.Linear(16, CLASSES)), nn.CrossEntropyLoss())


def sequential_batches(batches: int, samples: int) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(4)
    for _ in range(batches):
        yield {"input": torch.randn(samples, WIDTH, generator=random),
               "target": torch.randint(CLASSES, (samples,), generator=random)}
