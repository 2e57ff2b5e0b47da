"""torch.distributed.pipelining runs schedules of ours: losses and gradients are those of plain PyTorch, bit for bit.

A gradient is the sum over microbatches in the order in which the schedule completes them, as PyTorch adds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from world import World

from vpipe.errors import UserError
from vpipe.schedules.assignment import Layout, Placement, stages_of_rank
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.search.search import search

pytestmark = pytest.mark.jobs

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
    found = []
    for step in range(2):
        batch, target = data(count, step)
        losses: list[Tensor] = []
        runtime.step(*((batch,) if 0 in own else ()), target=target if schedule.stages - 1 in own else None,
                     losses=losses)
        plain_losses, gradients = plain(schedule.stages, count, step)
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


def data(microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of a step."""
    random = torch.Generator().manual_seed(step)
    batch, target = torch.randn(2, microbatches * SAMPLES, 6, generator=random)
    return batch, target


@cache
def plain(stages: int, microbatches: int, step: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    """The loss of every microbatch and its gradients by name, without a pipeline."""
    net, losses, gradients = nn.Sequential(*map(module, range(stages))), [], []
    for batch, target in zip(*(t.chunk(microbatches) for t in data(microbatches, step)), strict=True):
        loss = nn.functional.mse_loss(net(batch), target)
        of_microbatch = torch.autograd.grad(loss, list(net.parameters()))
        losses.append(loss.item())
        gradients.append(dict(zip((name for name, _ in net.named_parameters()), of_microbatch, strict=True)))
    return losses, gradients


UNEVEN: Placement = ((0,), (1,), (2,), (3,), (3,), (0,))
BLOCKS: Placement = ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))


def exportable(ranks: int, microbatches: int, more_chunks: tuple[int, ...] = ()) -> Iterator[tuple[str, Schedule]]:
    """Every schedule of ours that PyTorch can run, of this size, by a name for its file."""
    for recipe in RegisteredSchedule.imported():
        for chunks in {recipe.chunks, *(more_chunks if recipe.any_chunks else ())} if recipe.flush else ():
            try:
                schedule = build(recipe.name, recipe.layout(ranks, chunks), microbatches)
            except UserError:  # not of this size
                continue
            if all(len(held_by) == 1 for held_by in schedule.placement):
                yield f"{recipe.name}_{chunks}", schedule


def searched(placement: Placement, microbatches: int) -> Schedule:
    """An order for stages of very different costs."""
    return search(placement, microbatches, Costs(tuple(StageCosts(1 + stage % 3, 1, 1 + stage % 2)
                                                       for stage in range(len(placement)))))


def run_all(world: World, schedules: dict[str, Schedule], folder: Path) -> None:
    paths = []
    for name, schedule in schedules.items():
        (folder / f"{name}.csv").write_text(schedule.to_torch_csv())
        paths.append(str(folder / f"{name}.csv"))
    assert world.run(run_files, paths=paths) == [{f"{name}.csv": [] for name in schedules}] * world.ranks


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 opens its connections otherwise, and fails")
def test_every_schedule_with_a_flush(world: World, tmp_path: Path) -> None:
    out_of_turn = tmp_path / "turns"
    out_of_turn.write_text("0F1,0F0,0B0,0B1\n1F0,1F1,1B1,1B0\n2F1,2F0,2B1,2B0\n3F0,3F1,3B1,3B0\n")
    own = dict(exportable(4, 8))
    assert {f"{one.name}_{one.chunks}" for one in RegisteredSchedule.imported()
            if one.flush and not one.places_copies(4 * one.chunks)} == {*own}
    run_all(world, {**own, "searched": searched(UNEVEN, 6), "blocks": searched(BLOCKS, 5),
                    "turns": CsvFile.read(out_of_turn).schedule}, tmp_path)


@pytest.mark.system
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (2, 6), (3, 3), (3, 7), (5, 10)])
def test_every_schedule_in_many_sizes(ranks: int, microbatches: int, forked: None, tmp_path: Path) -> None:
    schedules = {**dict(exportable(ranks, microbatches, more_chunks=(2, 3, 4))),
                 "searched": searched(Layout.LOOP(ranks), microbatches)}
    assert {"1f1b_1", "zb_h1_1"} <= schedules.keys()
    world = World(ranks, tmp_path)
    try:
        for name, schedule in schedules.items():  # a job each: a world gives each a time
            run_all(world, {name: schedule}, tmp_path)
    finally:
        world.close()
