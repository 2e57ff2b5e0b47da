"""Write a training loop of one's own: evaluation, early stopping, the best checkpoint, what the stages did.

    python examples/training_loop.py                              all four stages in this process
    torchrun --nproc-per-node 4 examples/training_loop.py         one process per stage: the same losses

The pipeline is asynchronous, so it stays full from batch to batch; it empties before each evaluation alone.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from vpipe import Asynchronous, Model, Pipeline, Update

EVERY, MOST_UPDATES, WARM_UP = 20, 200, 10

# %% The model and the data: points in two interleaved spirals, a batch made from its number.
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                    nn.Linear(64, 2))
model = Model.sequential(net, loss=nn.CrossEntropyLoss())


def batch_of(number, samples=64):
    random = torch.Generator().manual_seed(number)
    label, radius = torch.randint(2, (samples,), generator=random), torch.rand(samples, generator=random)
    angle = 5 * radius + torch.pi * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return {"input": points + 0.02 * torch.randn(samples, 2, generator=random), "target": label}


def endless(number=0):
    while True:
        yield batch_of(number)
        number += 1


held_out = [batch_of(-1 - number) for number in range(4)]

# %% The pipeline: four stages, an update after every four microbatches, warm-up, clipping.
pipe = Pipeline(model, Update(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), grad_clip=1.0,
                              learning_rate_factor=lambda step: min(1.0, (step + 1) / WARM_UP)),
                stages=4, schedule=Asynchronous("pipedream", update_every=4), microbatches=4, seed=0)
folder, best = Path(tempfile.gettempdir()) / "vpipe-best", float("inf")

# %% The loop. Every rank runs it, and every rank takes the same decisions: a loss is the same number on all of them.
before = pipe.local_usage()
for step in pipe.train(endless(), pauses=EVERY, updates=MOST_UPDATES):
    done = step.index + 1
    if done % EVERY:
        continue
    held_out_loss = pipe.evaluate(held_out)
    if pipe.rank == 0:
        print(f"update {done}: loss {step.loss:.4f}, held out {held_out_loss:.4f}")
    if held_out_loss > best:
        break
    best = held_out_loss
    pipe.save(folder)

# %% What the stages did, and the best weights: those of a new pipeline that loads them.
usage = pipe.usage(before)
for number, stage in enumerate(usage):
    if pipe.rank == 0:
        print(f"stage {number}: {pipe.partition[number]} layers, {stage.versions} versions of its weights, gradients "
              f"at most {stage.staleness} updates late")
resumed = Pipeline(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), stages=4, schedule="gpipe",
                   microbatches=4)
position = resumed.load(folder)
again = resumed.evaluate(held_out)
if pipe.rank == 0:
    print(f"the best weights are those after update {position.updates}: held out {again:.4f}, "
          f"{'the same' if again == best else 'another'} loss")
