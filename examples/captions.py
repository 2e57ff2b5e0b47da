"""Pictures and words: the patches of a picture are a prefix of the tokens of its caption.

    python examples/captions.py
    torchrun --nproc-per-node 4 examples/captions.py

Two blocks see the picture alone; three more read its patches, then the caption. Pictures are drawn here: a square, or
the outline of one, in one of nine places, with noise. A caption is three words: what, in which row, in which column.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline

SIDE, PATCH, WIDTH, HEADS = 12, 4, 32, 4
BEGIN, WORDS = 8, 9  # square, outline; top, middle, bottom; left, center, right; the beginning
PATCHES = (SIDE // PATCH) ** 2


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH) / 4)

    def forward(self, picture):
        return self.patch(picture).flatten(2).transpose(1, 2) + self.place


class Join(nn.Module):
    """Put the words behind the patches. A word sees all patches, and the words up to it; a patch sees the patches."""

    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(3, WIDTH) / 4)

    def forward(self, patches, words):
        h = torch.cat([patches, self.word(words) + self.place], 1)
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).tril()
        mask[:, :PATCHES] = True
        return h, mask


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, h, mask=None):
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))
        return h + self.mlp(self.norms[1](h))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, h, labels):
        logits = self.words(self.norm(h[:, PATCHES:]))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


model = Model([
    Layer("picture", Picture, ("picture",), ("patches",)),
    *(Layer(f"vision{i}", Block, ("patches",), ("patches",)) for i in range(2)),
    Layer("join", Join, ("patches", "words"), ("h", "mask")),
    *(Layer(f"block{i}", Block, ("h", "mask"), ("h",)) for i in range(3)),
    Layer("head", Head, ("h", "labels"), ("loss", "logits")),
], batch=("picture", "words", "labels"))


def batches(count, seed, samples=64):
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(count):
        what, row, column = torch.stack([torch.randint(most, (samples,), generator=drawn) for most in (2, 3, 3)])
        y, x = (1 + 4 * row)[:, None, None], (1 + 4 * column)[:, None, None]
        down, right = torch.arange(SIDE)[:, None] - y, torch.arange(SIDE) - x
        square = (down >= 0) & (down < 3) & (right >= 0) & (right < 3)
        hole = (down == 1) & (right == 1) & (what == 1)[:, None, None]
        picture = (square & ~hole).float() + 0.1 * torch.randn(samples, SIDE, SIDE, generator=drawn)
        labels = torch.stack([what, 2 + row, 5 + column], 1)
        words = torch.cat([torch.full((samples, 1), BEGIN), labels[:, :-1]], 1)
        yield {"picture": picture[:, None], "words": words, "labels": labels}


torch.set_num_threads(1)
pipe = Pipeline(model, partial(torch.optim.AdamW, lr=6e-3), stages=4, microbatches=4)
losses = [step.loss for step in pipe.train(batches(60, seed=1))]
held_out, found = pipe.evaluate(batches(4, seed=2), outputs=lambda tensors: {
    "right": tensors["logits"].argmax(-1) == tensors["labels"]})
if pipe.rank == 0:
    right = ", ".join(f"{share:.0%}" for share in found["right"].float().mean(0))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, held out {held_out:.4f}, words that are right: {right}")
