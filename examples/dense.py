"""Dense connections: every block reads the outputs of all blocks before it, and no tensor is sent twice to a rank.

    python examples/dense.py
    torchrun --nproc-per-node 4 examples/dense.py

A block mixes them with weights that it learns (DenseFormer, arXiv:2402.02622).
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline

BLOCKS, WIDTH, SAMPLES = 8, 32, 64
STAGES = {"1f1b": [3, 2, 2, 3], "interleaved": [2, 1, 1, 1, 1, 1, 1, 2]}  # on four ranks


class Block(nn.Module):
    def __init__(self, before):
        super().__init__()
        self.mix = nn.Parameter(F.one_hot(torch.tensor(before - 1), before).float())  # begins with the latest alone
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, *before):
        h = sum(weight * each for weight, each in zip(self.mix, before, strict=True))
        return h + self.body(h)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = Block(BLOCKS + 1), nn.Linear(WIDTH, 1)

    def forward(self, y, *before):
        return F.mse_loss(self.out(self.mix(*before))[:, 0], y)


names = [f"h{i}" for i in range(BLOCKS + 1)]
model = Model([Layer("in", lambda: nn.Linear(2, WIDTH), inputs=("x",), outputs=("h0",)),
               *(Layer(f"block{i}", partial(Block, i), inputs=names[:i], outputs=(f"h{i}",))
                 for i in range(1, BLOCKS + 1)),
               Layer("head", Head, inputs=("y", *names), outputs=("loss",))], batch=("x", "y"))

torch.set_num_threads(1)
drawn = torch.Generator().manual_seed(0)
batches = [{"x": x, "y": (3 * x[:, 0]).sin() * (3 * x[:, 1]).cos()}
           for x in torch.randn(30, SAMPLES, 2, generator=drawn)]
losses, sent = {}, {}
for schedule, stages in STAGES.items():
    pipe = Pipeline(model, partial(torch.optim.AdamW, lr=1e-2), stages=stages, schedule=schedule, microbatches=4)
    losses[schedule] = [step.loss for step in pipe.train(batches)]
    sent[schedule] = [stage.bytes_sent // len(batches) for stage in pipe.usage()[:4]]  # of its whole rank
    if pipe.rank == 0:
        first, last = losses[schedule][0], losses[schedule][-1]
        print(f"{schedule}: loss {first:.4f} -> {last:.4f}; bytes that each rank sent per update: {sent[schedule]}")
