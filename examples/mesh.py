"""Two stages on a mesh, each over two ranks: split by tensor parallelism, or divided by fully_shard (FSDP2).

    torchrun --nproc-per-node 4 examples/mesh.py tensor
    torchrun --nproc-per-node 4 examples/mesh.py data
"""

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vpipe import Execution, Layer, Model, Pipeline


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(h)))


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 4)

    def forward(self, h, y):
        return nn.functional.mse_loss(self.out(h), y)


# %% The pipeline lives on the dimension called pp; the other one belongs to the layers.
torch.set_num_threads(1)
tensor = sys.argv[1:] != ["data"]
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp" if tensor else "dp"))


def block():
    if tensor:
        return parallelize_module(Block(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(Block(), mesh=mesh["dp"])


def loss():
    return Loss() if tensor else fully_shard(Loss(), mesh=mesh["dp"])


model = Model([*(Layer(f"block{i}", block, inputs=("h" if i else "x",)) for i in range(4)),
               Layer("loss", loss, inputs=("h", "y"), outputs=("loss",))], batch=("x", "y"))
pipe = Pipeline(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), stages=2, schedule="1f1b",
                microbatches=4 if tensor else 2,
                execution=Execution(device="cpu", mesh=mesh, data=None if tensor else "dp"))

# %% Lanes along tp read the same batches; those along dp each read their own part.
drawn = torch.Generator().manual_seed(0)
batches = [{"x": torch.randn(16, 16, generator=drawn), "y": torch.randn(16, 4, generator=drawn)} for _ in range(20)]
if not tensor:
    place = mesh["dp"].get_local_rank()
    batches = [{name: field[8 * place:8 * place + 8] for name, field in batch.items()} for batch in batches]
for step in pipe.train(batches):
    if pipe.rank == 0 and step.index % 5 == 4:
        print(f"step {step.index}: loss {step.loss:.4f}")
