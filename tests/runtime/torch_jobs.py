"""A job for a test world: PyTorch's own pipeline runtime under files of ours, against the model without a pipeline."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from vpipe.schedules.assignment import stages_of_rank
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.schedule import Schedule

SAMPLES = 2
"""Per microbatch."""


def run_files(*, paths: list[str]) -> dict[str, list[str]]:
    """What differs from plain PyTorch on a rank, by file."""
    return {Path(path).name: differences(path, CsvFile.read(Path(path)).schedule, dist.get_rank()) for path in paths}


def differences(path: str, schedule: Schedule, rank: int) -> list[str]:
    """Two updates of PyTorch's runtime; the losses and gradients that are not the oracle's, bit for bit."""
    count, own = schedule.microbatches, stages_of_rank(schedule.placement, rank)
    modules = {stage: module(stage) for stage in own}
    runtime = _PipelineScheduleRuntime(
        [PipelineStage(one, stage, schedule.stages, torch.device("cpu")) for stage, one in modules.items()],
        count, loss_fn=nn.MSELoss())
    runtime._load_csv(path)
    found, random = [], torch.Generator().manual_seed(0)
    for step in range(2):
        batch, target = (torch.randn(count * SAMPLES, 6, generator=random) for _ in range(2))
        losses: list[Tensor] = []
        runtime.step(*((batch,) if 0 in own else ()), target=target if schedule.stages - 1 in own else None,
                     losses=losses)
        plain_losses, gradients = plain(schedule.stages, batch.chunk(count), target.chunk(count))
        if losses and [loss.item() for loss in losses] != plain_losses:
            found.append(f"losses of step {step}")
        for stage, one in modules.items():
            turns = [action.microbatch for action in schedule.programs[rank]
                     if action.op.completes and action.stage == stage]
            for name, parameter in one.named_parameters():
                total = gradients[turns[0]][f"{stage}.{name}"]
                for microbatch in turns[1:]:
                    total = total + gradients[microbatch][f"{stage}.{name}"]
                if parameter.grad is None or not torch.equal(parameter.grad, total / count):
                    found.append(f"gradient of {stage}.{name} of step {step}")
            one.zero_grad()
    return found


def module(stage: int) -> nn.Module:
    """The layers of a stage, the same wherever they are made."""
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.LayerNorm(6))


def plain(stages: int, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[list[float],
                                                                                        list[dict[str, Tensor]]]:
    """The loss of every microbatch and its gradients by name, without a pipeline."""
    net, losses, gradients = nn.Sequential(*map(module, range(stages))), [], []
    for batch, target in zip(inputs, targets, strict=True):
        loss = nn.functional.mse_loss(net(batch), target)
        of_microbatch = torch.autograd.grad(loss, list(net.parameters()))
        losses.append(loss.item())
        gradients.append(dict(zip((name for name, _ in net.named_parameters()), of_microbatch, strict=True)))
    return losses, gradients
