"""Answers of different lengths: every token of an update counts the same, and an average of the weights is evaluated.

Of a prompt nothing is learned, so that samples, and microbatches, have different numbers of labels.

    python examples/token_weights.py
    torchrun --nproc-per-node 4 examples/token_weights.py
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline, Update

WORDS, WIDTH, LENGTH = 29, 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h):
        return h + self.out(self.mix(self.norm(h))[0])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, h, labels):
        return F.cross_entropy(self.words(h).flatten(0, 1), labels.flatten())  # the mean over the labels; -100 is none


def batches(count, seed):
    """Counting in steps of 1 to 3 from a random word on, a tenth misspelt; labels begin behind 2 to 14 tokens."""
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(count):
        first, step = (torch.randint(low, high, (16, 1), generator=drawn) for low, high in ((0, WORDS), (1, 4)))
        text = (first + step * torch.arange(LENGTH + 1)) % WORDS
        noise = torch.randint(WORDS, text.shape, generator=drawn)
        text = noise.where(torch.rand(text.shape, generator=drawn) < 0.1, text)
        # Sorted, so that the first microbatches have most labels.
        prompts = torch.randint(2, LENGTH - 1, (16, 1), generator=drawn).sort(0).values
        labels = text[:, 1:].where(torch.arange(LENGTH) >= prompts, Model.NO_LABEL)
        yield {"ids": text[:, :-1], "labels": labels}


model = Model([Layer("embed", lambda: nn.Embedding(WORDS, WIDTH), inputs=("ids",)),
               *(Layer(f"block{i}", Block) for i in range(3)),
               Layer("head", Head, inputs=("h", "labels"), outputs=("loss",))],
              batch=("ids", "labels"), labels="labels")
update = Update(partial(torch.optim.AdamW, lr=0.02), per_token_loss=True, average=0.9)


torch.set_num_threads(1)
pipe = Pipeline(model, update, stages=4, microbatches=8)
losses = [step.loss for step in pipe.train(batches(60, seed=1))]
held_out = [pipe.evaluate(batches(8, seed=2), averaged=averaged)
            for averaged in (False, True)]
if pipe.rank == 0:
    print(f"60 updates, loss per token {losses[0]:.4f} -> {losses[-1]:.4f}, held out {held_out[0]:.4f}, with averaged "
          f"weights {held_out[1]:.4f}")
