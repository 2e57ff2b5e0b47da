"""Train an nn.Sequential of your own through a pipeline.

    python examples/quickstart.py                                 all four stages in this process
    torchrun --nproc-per-node 4 examples/quickstart.py            one process per stage: the same numbers
"""

# %% A model: any nn.Sequential. Every child is a layer, and the pipeline may be cut between layers.
import torch
from torch import nn

from vpipe import Asynchronous, Model, Pipeline

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
    nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 2),
)
model = Model.sequential(net, loss=nn.CrossEntropyLoss())  # trains a copy: net.load_state_dict(pipe.state_dict())

# %% Data: dicts with "input" and "target", dimension 0 = samples. Two interleaved spirals. Every process reads the same
# batches: give a DataLoader that shuffles generator=torch.Generator().manual_seed(1), as these samples have one.
random = torch.Generator().manual_seed(1)


def spirals(samples):
    label = torch.randint(2, (samples,), generator=random)
    radius = torch.rand(samples, generator=random)
    angle = 5 * radius + torch.pi * label
    noise = 0.02 * torch.randn(samples, 2, generator=random)
    return {"input": torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise, "target": label}


batches = [spirals(64) for _ in range(36)]
held_out = [spirals(64) for _ in range(4)]

# %% The same model under three schedules. 1f1b and gpipe wait for the pipeline to empty before a step, so they
# compute exactly what one device would; pipedream never waits, and updates after every four microbatches here.
for schedule in ("gpipe", "1f1b", "pipedream"):
    pipe = Pipeline(model, lambda params: torch.optim.AdamW(params, lr=8e-3), stages=4,
                    schedule=Asynchronous(schedule, update_every=4 if schedule == "pipedream" else None),
                    microbatches=8, seed=0)
    losses = [step.loss for step in pipe.train(batches)]
    accuracy_loss = pipe.evaluate(held_out)
    if pipe.rank == 0:
        print(f"{schedule:>9}: partition {list(pipe.partition)}, {len(losses)} updates, "
              f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, held out {accuracy_loss:.6f}")

# %% The whole model, whatever the partition, under the names it had in the nn.Sequential.
state = pipe.state_dict()
if pipe.rank == 0:
    print(f"{len(state)} tensors: {', '.join(list(state)[:4])}, ...")
