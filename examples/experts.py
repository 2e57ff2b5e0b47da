"""Experts in the middle stages: a loss of balance in each, as a tensor of its own that only the head reads.

    python examples/experts.py
    torchrun --nproc-per-node 4 examples/experts.py
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline

EXPERTS, WIDTH = 4, 32


class Experts(nn.Module):
    """One of four experts for each sample (Switch Transformer, arXiv:2101.03961)."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
                                     for _ in range(EXPERTS))

    def forward(self, h):
        x = self.norm(h)
        odds = self.router(x).softmax(-1)
        odd, chosen = odds.max(-1)
        made = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            made = made.index_add(0, mine, expert(x[mine]))
        shares = F.one_hot(chosen, EXPERTS).float().mean(0)
        return h + odd[:, None] * made, EXPERTS * (shares * odds.mean(0)).sum(), chosen


class Head(nn.Module):
    def __init__(self, balance):
        super().__init__()
        self.out, self.balance = nn.Linear(WIDTH, 1), balance

    def forward(self, h, y, first, second, *chosen):  # which expert each sample had is there to be evaluated
        loss = F.mse_loss(self.out(h)[:, 0], y)
        return loss + self.balance * (first + second) if self.training else loss  # an evaluation is of the task alone


def model(balance):
    return Model([Layer("in", lambda: nn.Linear(2, WIDTH), ("x",)),
                  *(Layer(f"experts{i}", Experts, outputs=("h", f"balance{i}", f"chosen{i}")) for i in (0, 1)),
                  Layer("head", partial(Head, balance), ("h", "y", "balance0", "balance1", "chosen0", "chosen1"),
                        ("loss",))], batch=("x", "y"))


torch.set_num_threads(1)
points = torch.randn(30, 128, 2, generator=torch.Generator().manual_seed(0))
batches = [{"x": x, "y": torch.where(x[:, 0] > 0, 1, -1) * (3 * x[:, 1]).sin()} for x in points]
for balance in (0.0, 0.05):
    pipe = Pipeline(model(balance), partial(torch.optim.AdamW, lr=1e-2), stages=4, microbatches=4)
    losses = [step.loss for step in pipe.train(batches)]
    loss, found = pipe.evaluate(batches, outputs=("chosen0", "chosen1"))
    shares = [chosen.bincount(minlength=EXPERTS) / len(chosen) for chosen in found.values()]
    if pipe.rank == 0:
        print(f"balance {balance}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, evaluated {loss:.4f}, samples of each "
              "expert", " and ".join(", ".join(f"{share:.0%}" for share in of_layer) for of_layer in shares))
