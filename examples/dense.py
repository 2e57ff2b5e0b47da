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

BLOCKS, WIDTH, SAMPLES, STAGES = 8, 32, 64, [3, 2, 2, 3]


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
pipe = Pipeline(model, partial(torch.optim.AdamW, lr=1e-2), stages=STAGES, microbatches=4)
losses = [step.loss for step in pipe.train(batches)]
sent = [stage.bytes_sent // len(losses) for stage in pipe.usage()]
if pipe.rank == 0:
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; bytes that each rank sent per update: {sent}")
