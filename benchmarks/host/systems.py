"""Train layers so small that only the host's work takes time: under a schedule, and bare."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Execution, Model, Pipeline
from vpipe.errors import PerformanceWarning

STAGES, MICROBATCHES, WIDTH = 4, 32, 8
BATCH = {"input": torch.randn(MICROBATCHES, WIDTH), "target": torch.randn(MICROBATCHES, WIDTH)}


class Seconds(NamedTuple):
    """Seconds of a microbatch at a stage, over rounds: elapsed, and of the processor."""

    median_s: float
    least_s: float
    cpu_median_s: float
    cpu_least_s: float


def layers() -> nn.Sequential:
    """One layer per stage."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)))


def pipelines(optimizer: Callable[..., torch.optim.Optimizer], device: torch.device) -> dict[str, Pipeline]:
    """Return a pipeline of all stages in this process per schedule; pipedream makes an update per microbatch."""
    warnings.simplefilter("ignore", PerformanceWarning)  # of late gradients
    model = Model.sequential(layers(), loss=nn.MSELoss())
    return {schedule: Pipeline(model, optimizer, stages=[1] * STAGES, schedule=schedule, microbatches=MICROBATCHES,
                               execution=Execution(device=device)) for schedule in ("1f1b", "pipedream")}


def train(pipe: Pipeline, batch: Mapping[str, Tensor], batches: int) -> None:
    """Train on the same batch a number of times."""
    for _ in pipe.train([batch] * batches):
        pass


def bare_layers(device: torch.device) -> Callable[[], None]:
    """Return a batch through the layers alone: stages cut the graph, as in a pipeline, and nothing else is done."""
    modules = list(layers().to(device))
    inputs, targets = (BATCH[name].to(device).chunk(MICROBATCHES) for name in ("input", "target"))

    def batch() -> None:
        for i, target in enumerate(targets):
            ends: list[tuple[Tensor, Tensor]] = []
            h = inputs[i]
            for module in modules[:-1]:
                output = module(h)
                ends.append((h, output))
                h = output.detach().requires_grad_()
            loss = F.mse_loss(modules[-1](h), target)
            loss.backward()
            for before, output in reversed(ends):
                output.backward(h.grad)
                h = before

    return batch


def bare_steps(optimizer: Callable[..., torch.optim.Optimizer], device: torch.device) -> Callable[[], None]:
    """Return a batch's optimizer steps alone: one per stage and microbatch."""
    modules = list(layers().to(device))
    optimizers = [optimizer(list(module.parameters())) for module in modules]
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def batch() -> None:
        for _ in range(MICROBATCHES):
            for each in optimizers:
                each.step()

    return batch


def measure(systems: Mapping[str, Callable[[], None]], rounds: int, batches: int) -> dict[str, Seconds]:
    """Let the systems take turns, ``batches`` per call of one; the first round warms up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, run in systems.items():
            started, cpu = perf_counter(), process_time()
            run()
            ended, cpu_ended = perf_counter(), process_time()
            if number:
                times[name].append((ended - started, cpu_ended - cpu))
    each = batches * STAGES * MICROBATCHES
    return {name: Seconds(*(figure(column) / each for column in zip(*rows, strict=True) for figure in (median, min)))
            for name, rows in times.items()}
