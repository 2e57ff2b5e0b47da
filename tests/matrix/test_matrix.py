"""Schedule x tensor parallelism x replicas x ZeRO-1 x recomputation x precision: every cell equals its oracle.

``cells.csv`` lists the cells. A lane is one rank, which runs all stages and all their replicas; tensor parallelism is
over 1, 2 or 4 of them. The oracle runs the same layers, shard by shard, without a pipeline: so all schedules of a kind
have the same bits. Against one device nothing but the order of sums differs, so that where no sum rounds the weights
have the bits of one device.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

import matrix_jobs
import pytest
from world import World

pytestmark = pytest.mark.jobs

CELLS = list(csv.DictReader(Path(__file__).with_name("cells.csv").read_text().splitlines()))
HALF_MADE = next(cell for cell in CELLS if list(cell.values()) == ["2bw", "2", "2", "yes", "0", "bf16_pure"])
"""Lanes were compared in weights of a version that had not come from the replica that steps them."""

SAMPLE = [*random.Random(2026).sample(CELLS, 4), HALF_MADE]


def named(cell: dict[str, str]) -> str:
    return "-".join(cell.values())


def holds(world: World, cell: dict[str, str]) -> None:
    results = [matrix_jobs.cell(row=cell)] if cell["tensor"] == "1" else world.run(matrix_jobs.cell, row=cell)
    assert results == [matrix_jobs.is_that_of_one_device(cell, None)] * len(results)


@pytest.mark.parametrize("cell", SAMPLE, ids=named)
def test_a_sample_of_the_cells(world: World, cell: dict[str, str]) -> None:
    holds(world, cell)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", CELLS, ids=named)
def test_every_cell(world: World, cell: dict[str, str]) -> None:
    holds(world, cell)
