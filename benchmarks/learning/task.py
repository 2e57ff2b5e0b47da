"""What every run trains: a small GPT over the bytes of Python sources.

b batch (sequences), s sequence (tokens), h hidden size, a attention heads, d = h / a, i inner size, v vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vpipe import Layer, Model
from vpipe.app.data.local_corpus import STANDARD_LIBRARY, sources
from vpipe.app.families.transformer import attention

BLOCKS, HIDDEN, HEADS, TOKENS, VOCABULARY = 8, 64, 4, 48, 256
SEQUENCES = 12_800
"""N: sequences of a run, 800 updates of 16."""
MOST_SEQUENCES = 4 * SEQUENCES
PACKAGES = (STANDARD_LIBRARY, "sympy", "networkx", "mpmath")
MOST_BYTES = 65_536
"""Of a file; longer ones are mostly tables."""
HELD_OUT = 20
"""One file in so many."""
VALIDATION = 2_048
"""Held-out sequences; the final loss of a run is their mean."""


class Embeddings(nn.Module):
    """Token + position embeddings: int64 [B, S] -> [B, S, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(TOKENS, HIDDEN)

    def forward(self, ids_bs: Tensor) -> Tensor:
        return self.token(ids_bs) + self.position.weight


class Block(nn.Module):
    """Norm, attention, add, norm, MLP, add, without biases, ReLU inside: [B, S, H] -> [B, S, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(HIDDEN, bias=False)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp_norm = nn.LayerNorm(HIDDEN, bias=False)
        self.expand = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.contract = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        with torch.no_grad():  # as in GPT-2: they join a sum of 2n for n blocks
            for residual in (self.output, self.contract):
                residual.weight /= math.sqrt(2 * BLOCKS)

    def forward(self, h_bsh: Tensor) -> Tensor:
        qkv_bs3ad = self.qkv(self.attention_norm(h_bsh)).unflatten(-1, (3, HEADS, -1))
        mixed_basd = attention(*qkv_bs3ad.permute(2, 0, 3, 1, 4), causal=True)
        h_bsh = h_bsh + self.output(mixed_basd.transpose(1, 2).flatten(2))
        return h_bsh + self.contract(F.relu(self.expand(self.mlp_norm(h_bsh))))


class FirstBlock(nn.Module):
    """Embeddings and a block: int64 [B, S] -> [B, S, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.block = Block()

    def forward(self, ids_bs: Tensor) -> Tensor:
        return self.block(self.embeddings(ids_bs))


class Head(nn.Module):
    """Mean loss of the next token: [B, S, H] and int64 labels [B, S] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, h_bsh: Tensor, labels_bs: Tensor) -> Tensor:
        return F.cross_entropy(self.decoder(self.norm(h_bsh)).flatten(0, 1), labels_bs.flatten())


def gpt() -> Model:
    """A layer per block, the embeddings in the first, and the head."""
    return Model([Layer("block0", FirstBlock, ("input_ids",)),
                  *(Layer(f"block{i}", Block) for i in range(1, BLOCKS)),
                  Layer("head", Head, ("h", "labels"), ("loss",))], batch=("input_ids", "labels"))


def partition(stages: int) -> list[int]:
    """Equally many blocks per stage; the head in the last."""
    return [BLOCKS // stages] * (stages - 1) + [BLOCKS // stages + 1]


@cache
def _texts() -> tuple[bytes, bytes]:
    """What is trained on and what is held out: whole files, divided by the digest of what they contain."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    seen = set()
    for package in PACKAGES:
        for path in sources(package):
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if 0 < len(content) <= MOST_BYTES and digest not in seen:
                seen.add(digest)
                (train if digest[0] % HELD_OUT else held_out).append(content)
    return b"\n".join(train), b"\n".join(held_out)


@cache
def text_id() -> str:
    """The SHA-256 of all text, shortened: runs are compared only where it is the same."""
    return hashlib.sha256(b"\0".join(_texts())).hexdigest()[:12]


def text_facts() -> str:
    """What the text is: versions, bytes, SHA-256."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES[1:])
    train, held_out = _texts()
    return (f"sources of the standard library of Python {platform.python_version()}, {versions}: {len(train):,} bytes "
            f"to train on, {len(held_out):,} held out, SHA-256 {text_id()}")


@cache
def _tensor(part: int) -> Tensor:
    return torch.frombuffer(bytearray(_texts()[part]), dtype=torch.uint8)


def batches(size: int, sequences: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """``input_ids`` and ``labels``, int64 [B, S]: a seed's sequences in their order, whatever the size of a batch."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(_tensor(0)) - TOKENS, (MOST_SEQUENCES,), generator=generator)
    return map(partial(_batch, _tensor(0)), starts[:sequences].split(size))


def validation() -> Iterator[dict[str, Tensor]]:
    """Held-out sequences, the same for every run; 256 in a batch."""
    starts = torch.linspace(0, len(_tensor(1)) - TOKENS - 1, VALIDATION, dtype=torch.float64).long()
    return map(partial(_batch, _tensor(1)), starts.split(256))


def _batch(text: Tensor, starts: Tensor) -> dict[str, Tensor]:
    stretches = text[starts[:, None] + torch.arange(TOKENS + 1)].long()
    return {"input_ids": stretches[:, :-1].contiguous(), "labels": stretches[:, 1:].contiguous()}
