"""The models of the GPU report: a small transformer in vpipe's layers, and jobs of published sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model
from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job

CONFIGS = Path(__file__).parent.parent.parent / "configs"
VOCABULARY, WIDTH, LENGTH = 211, 64, 32
SMALL = "--small" in sys.argv
STEPS = 2 if SMALL else 3
"""Batches that the small transformer is trained on."""


class Embed(nn.Module):
    """Token numbers [samples, tokens] to vectors, and the mask of padding (token 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), (ids != 0)[:, None, None]


class Block(nn.Module):
    """Attention and a feed-forward part over [samples, tokens, width]; it reads a mask that skips stages."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2)
                             for part in self.mix(self.norm(h)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return h + self.dropout(self.down(F.gelu(self.up(h))))


class Head(nn.Module):
    """The loss; its matrix is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.LayerNorm(WIDTH), nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((self.norm(h) @ self.table.T).flatten(0, 1), labels.flatten())


def small_model(blocks: int, dropout: float = 0.1) -> Model:
    """A transformer of ``blocks`` + 2 layers: a mask skips stages, the last layer is tied to the first."""
    return Model([Layer("embed", Embed, ("ids",), ("h", "mask")),
                  *(Layer(f"block{number}", lambda: Block(dropout), ("h", "mask"), ("h",)) for number in range(blocks)),
                  Layer("head", Head, ("h", "labels"), ("loss",), ties={"table": "embed.table.weight"})],
                 batch=("ids", "labels"))


def small_batches(samples: int) -> list[dict[str, Tensor]]:
    """Random batches, the same everywhere, on the processor; the last tokens of every sample are padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (STEPS, samples, LENGTH), generator=generator)
    ids[:, :, -3:] = 0
    labels = torch.randint(VOCABULARY, ids.shape, generator=generator)
    return [{"ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def published_jobs(small: bool) -> dict[str, Job]:
    """GPT 124M and BERT-large in one stage, random samples, bf16, 4 microbatches; in a rehearsal tiny, in fp32."""
    common = ["dataset.name=synthetic", "dataset.path=null", "training.num_microbatches=4", "parallel.plan=null",
              "parallel.model_parallel_size=1", "parallel.partition=auto", "parallel.recompute=0.0",
              "parallel.backend=null", "training.precision=bf16", "model.dropout=0.0", "training.lr_policy=constant",
              "training.epochs=1", "training.grad_clip=null"]
    sizes = {"gpt2_124m.yaml": ["model.vocab_size=50304", "dataset.batch_size=32"],
             "bert_base.yaml": ["model.preset=large", "model.vocab_size=30522", "model.sequence_length=512",
                                "dataset.batch_size=32"]}
    if small:
        tiny = ["model.preset=null", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2",
                "model.vocab_size=512", "model.sequence_length=32", "dataset.batch_size=8", "training.precision=fp32"]
        sizes = dict.fromkeys(sizes, tiny)
    return {name: Job.from_config(load_config(CONFIGS / file, [*common, *settings]))
            for name, (file, settings) in zip(("GPT 124M", "BERT-large"), sizes.items(), strict=True)}
