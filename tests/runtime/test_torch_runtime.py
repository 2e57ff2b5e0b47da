"""torch.distributed.pipelining runs schedules of ours: losses and gradients are those of plain PyTorch, bit for bit.

A gradient is the sum over microbatches in the order in which the schedule completes them, as PyTorch adds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch_jobs
from world import World

from vpipe.errors import UserError
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.search.search import search
from vpipe.schedules.size import Placement

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
    assert world.run(torch_jobs.run_files, paths=paths) == [{f"{name}.csv": [] for name in schedules}] * world.ranks


def test_every_schedule_with_a_flush(world: World, tmp_path: Path) -> None:
    out_of_turn = tmp_path / "turns"
    out_of_turn.write_text("0F1,0F0,0B0,0B1\n1F0,1F1,1B1,1B0\n2F1,2F0,2B1,2B0\n3F0,3F1,3B1,3B0\n")
    own = dict(exportable(4, 8))
    assert len(own) == len(RegisteredSchedule.names()) - 5, "three are asynchronous, two have copies of their stages"
    run_all(world, {**own, "searched": searched(UNEVEN, 6), "blocks": searched(BLOCKS, 5),
                    "turns": CsvFile.read(out_of_turn).schedule}, tmp_path)
