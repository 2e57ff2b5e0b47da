"""A package that adds a kind of action, and a job that trains with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vpipe import Model, Pipeline

PACKAGE = '''"""{kind}: the average of a stage's weights over its updates, as an action behind every step."""

from vpipe.schedules.action import Action
from vpipe.schedules.generators.one_f_one_b import one_f_one_b
from vpipe.schedules.kinds import UPDATE, UPDATED, Kind, Memory, Value, register_kind
from vpipe.schedules.registry import register_schedule

MEAN = Value("average of weights", bytes=lambda cost: cost.version_bytes)
{kind} = register_kind(Kind(
    "{kind}", "average of weights", UPDATE, "{package}:average", generated=True,
    needs=lambda at, stage, update, rank: [(UPDATED, stage, update)], seconds=lambda cost: cost.step_s / 2,
    makes=((MEAN, 0),), memory=Memory(leaves=(MEAN,)), colour="#d0bfff"))


@register_schedule("{package}_1f1b", flush=True,
                   peak_activations=lambda rank, size: min(size.ranks - rank, size.microbatches))
def averaged(rank, ranks, microbatches):
    """1F1B, and the average behind every step."""
    yield from one_f_one_b(rank, ranks, microbatches)
    yield Action({kind}, rank, 0)


AVERAGES = {{}}


def average(worker, stage, update):
    """Move the averages of a stage's weights a tenth of the way."""
    for name, weight in worker.stages[stage].weights.masters.items():
        mean = AVERAGES.setdefault(name, weight.detach().clone())
        mean.lerp_(weight.detach(), 0.1)
'''


def install(folder: Path, package: str, kind: str) -> None:
    """Put the package where Python finds it once ``folder`` is on its path."""
    (folder / f"{package}.py").write_text(PACKAGE.format(package=package, kind=kind))
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[vpipe.actions]\n{kind} = {package}\n[vpipe.schedules]\n{package}_1f1b = {package}\n")


def train(*, folder: str, package: str, schedule: str | None = None, ranks: int = 4) -> dict[str, Any]:
    """Two updates of four stages: the losses, and this process's averages."""
    if not dist.is_initialized() or dist.get_rank() < ranks:
        sys.path.insert(0, folder)
    try:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        pipe = Pipeline(Model.sequential(layers, loss=nn.MSELoss()), lambda weights: torch.optim.SGD(weights, lr=0.1),
                        stages=4, schedule=schedule or f"{package}_1f1b", microbatches=4, seed=0)
        data = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
        losses = [step.loss for step in pipe.train({"input": batch, "target": batch.flip(1)} for batch in data)]
        averages = {name: mean.tolist() for name, mean in sys.modules[package].AVERAGES.items()}
        sys.modules[package].AVERAGES.clear()
        return {"losses": losses, "averages": averages}
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
