"""Compare PyTorch's own pipeline, torch.distributed.pipelining, with the oracle of vpipe.testing.

    torchrun --nproc-per-node 4 examples/beside_an_oracle.py

No part of vpipe runs the pipeline. What the oracle needs of it: the model, the batches, and the gradients and weights
of every update, by name. Put your own pipeline in its place.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from vpipe import Model
from vpipe.testing import TrainingRecipe, Trajectory, compare, flush_oracle

MICROBATCHES, UPDATES = 8, 3


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


# %% A model: the children of an nn.Sequential are layers, called "0", "1" ...
torch.set_num_threads(1)  # with more, sums have another order, and the last bits differ
torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(8)))
model = Model.sequential(net, loss=nn.MSELoss())
batches = [{"input": torch.randn(32, 16), "target": torch.randn(32, 16)} for _ in range(UPDATES)]

# %% Somebody else's pipeline: an equal part of the children per rank, under torch's 1F1B.
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
own = range(len(net))[len(net) // ranks * rank:len(net) // ranks * (rank + 1)]
trained = deepcopy(net)  # the model is of net, which stays as it is
named = {f"{child}.{name}": value for child in own for name, value in trained[child].named_parameters()}
stage = PipelineStage(trained[own.start:own.stop], rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
optimizer = make_optimizer(named.values())

trajectory, losses_of_steps = Trajectory(), []
for update, batch in enumerate(batches):
    losses = []
    schedule.step(*[batch["input"]] if rank == 0 else [],
                  **{"target": batch["target"], "losses": losses} if rank == ranks - 1 else {})
    trajectory.gradients(update, {name: value.grad for name, value in named.items()})
    optimizer.step()
    optimizer.zero_grad()
    trajectory.weights(update, named)
    losses_of_steps.append(float(torch.stack(losses).detach().double().mean()) if losses else None)

# %% The oracle: plain PyTorch that accumulates the gradients of the microbatches. It begins with the same weights.
gathered = [None] * ranks
dist.all_gather_object(gathered, (trajectory, losses_of_steps))
if rank == 0:
    for each, _ in gathered:
        each.losses = gathered[-1][1]  # the last rank has the losses
    whole = Trajectory.join({number: each for number, (each, _) in enumerate(gathered)})
    reference = Trajectory()
    flush_oracle(model, batches, TrainingRecipe(lambda by_name: make_optimizer(by_name.values()), MICROBATCHES,
                                                trajectory=reference))
    for difference in compare(whole, reference):
        print(f"update {difference.step}: loss {difference.loss:.6f}, "
              + ("equal to the last bit" if difference.within(0) else str(difference)))
dist.destroy_process_group()
