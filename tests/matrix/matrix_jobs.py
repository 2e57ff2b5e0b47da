"""What a cell of the matrix runs: a stranger's layers on DTensors, in lanes that each run all stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jobs import fingerprint
from pipelines import parts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline
from vpipe.testing import compare, record, references

PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
STAGES, RANKS = 4, 4
STREAMS = ("pipedream", "2bw")
MICROBATCHES = 4
"""A power of two, by which gradients are divided without rounding; three replicas take 2, 1 and 1 of them."""


class Gated(nn.Module):
    """A layer that vpipe has never seen, with PyTorch's own plan for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, h: Tensor) -> Tensor:
        n = self.norm(h)
        return h + F.dropout(self.down(F.silu(self.gate(n)) * self.up(n)), 0.1, self.training)


class Integers(Gated):
    """The same without roundings: weights of small integers in double precision, relu, no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape).double()

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.relu(self.gate(h)) + self.up(h))


class Loss(nn.Module):
    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(h.float(), y.float())


class IntegerLoss(nn.Module):
    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return (h * y).mean()


def model(layer: type[nn.Module], loss: type[nn.Module], mesh: DeviceMesh | None) -> Model:
    def build() -> nn.Module:
        return layer() if mesh is None else parallelize_module(layer(), mesh, PLAN)

    return Model([Layer(f"b{i}", build, inputs=("x" if i == 0 else "h",)) for i in range(STAGES)]
                 + [Layer("loss", loss, inputs=("h", "y"), outputs=("loss",))], batch=("x", "y"))


def described(cell: Mapping[str, str], mesh: DeviceMesh | None) -> dict[str, Any]:
    """The words of the pipeline of a cell: every stage in this process, and every replica."""
    width = int(cell["width"])
    words: dict[str, Any] = {"schedule": cell["schedule"], "partition": [1, 1, 1, 2], "replicas": width,
                             "microbatches": MICROBATCHES, "recompute": float(cell["recompute"]),
                             "zero1": cell["zero1"] == "yes"}
    if cell["schedule"] in STREAMS:
        words["update_every"] = 1 if cell["schedule"] == "pipedream" else 4
    return words | ({} if mesh is None else {"mesh": mesh})


def equals_its_oracle(cell: Mapping[str, str], mesh: DeviceMesh | None) -> None:
    """Compare losses and weights with those of the same layers without a pipeline, bit for bit."""
    drawn = torch.Generator().manual_seed(5)
    batches = [{name: torch.randn(MICROBATCHES, 3, 8, generator=drawn) for name in "xy"} for _ in range(2)]
    scale = 1024 if cell["precision"] == "fp16" and cell["schedule"] in STREAMS else None  # no flush to find it at
    pipe = Pipeline(model(Gated, Loss, None if mesh is None else mesh["tp"]),
                    **parts(**described(cell, mesh), optimizer=adamw, precision=cell["precision"], loss_scale=scale))
    run = record(pipe, batches)
    oracle = next(references(pipe.model, pipe.description, pipe.lowered, batches))
    assert not oracle.bound
    for difference in compare(run, oracle.trajectory):
        assert difference.within(0), f"{oracle.name}: {difference}"


def is_that_of_one_device(cell: Mapping[str, str], mesh: DeviceMesh | None) -> dict[str, str]:
    """The weights after one update without any rounding: whatever is added in whatever order, the sums are the same.

    With each update the numbers get longer: pipedream makes one of a batch, too, not four.
    """
    drawn = torch.Generator().manual_seed(6)
    batch = {name: torch.randint(-1, 2, (MICROBATCHES, 4, 8), generator=drawn).double() for name in "xy"}
    pipe = Pipeline(model(Integers, IntegerLoss, None if mesh is None else mesh["tp"]),
                    **parts(**described(cell, mesh) | ({"update_every": MICROBATCHES} if cell["schedule"] == "pipedream"
                                                       else {}), optimizer=sgd))
    list(pipe.train([batch]))
    return fingerprint(pipe.state_dict())


def adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25)


_meshes: dict[int, DeviceMesh] = {}


def cell(*, row: Mapping[str, str]) -> dict[str, str]:
    """Its weights without roundings, once it has been found equal to its oracle."""
    tensor = int(row["tensor"])
    if tensor > 1 and tensor not in _meshes:
        _meshes[tensor] = init_device_mesh("cpu", (RANKS // tensor, 1, tensor), mesh_dim_names=("same", "pp", "tp"))
    equals_its_oracle(row, _meshes.get(tensor))
    return is_that_of_one_device(row, _meshes.get(tensor))
