"""Long texts in slices: the sums of linear attention go from a slice to the next, and their gradients come back.

    python examples/slices.py
    torchrun --nproc-per-node 4 examples/slices.py
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from vpipe import Layer, Model, Order, Pipeline

WORDS, WIDTH, LENGTH = 29, 16, 32


class LinearAttention(nn.Module):
    """A token reads the sum over all tokens up to it of what their keys and values have in common: a recurrence."""

    def __init__(self):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, carried=None):
        query, key, value = self.project(self.norm(h)).chunk(3, -1)
        sums = (key.relu()[..., :, None] * value[..., None, :]).cumsum(1)
        if carried:  # of the slices before; empty for the first one
            sums = sums + carried[0]
        h = h + self.out((query.relu()[..., None, :] @ sums).squeeze(-2) / WIDTH)
        return h if carried is None else (h, sums[:, -1:])  # None: whole sequences


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, h, labels):
        return F.cross_entropy(self.words(h).flatten(0, 1), labels.flatten())  # the mean over the labels of the slice


def batches(count):
    """Counting in steps that a word in front of the text tells."""
    drawn = torch.Generator().manual_seed(1)
    for _ in range(count):
        first, step = (torch.randint(low, high, (16, 1), generator=drawn) for low, high in ((0, WORDS), (1, 9)))
        text = torch.cat((step, (first + step * torch.arange(LENGTH)) % WORDS), 1)
        yield {"ids": text[:, :-1], "labels": text[:, 1:]}


model = Model([Layer("embed", lambda: nn.Embedding(WORDS, WIDTH), inputs=("ids",), carried=()),
               *(Layer(f"block{i}", LinearAttention, carried=("sums",)) for i in range(3)),
               Layer("head", Head, inputs=("h", "labels"), outputs=("loss",), carried=())],
              batch=("ids", "labels"), labels="labels")

torch.set_num_threads(1)
losses = {}
for order in (Order("1f1b"), Order("seq1f1b", slices=4)):
    pipe = Pipeline(model, partial(torch.optim.AdamW, lr=0.05), stages=4, schedule=order, microbatches=4)
    found = losses[order.schedule] = [step.loss for step in pipe.train(batches(16))]
    held = [stage.peak_activations / (order.slices or 1) for stage in pipe.usage()]
    if pipe.rank == 0:
        print(f"{order.schedule}: loss {found[0]:.4f} -> {found[-1]:.4f}, microbatches held by each rank {held}")
