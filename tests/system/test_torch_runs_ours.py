"""Every schedule that torch.distributed.pipelining can run of ours, in many sizes; see tests/runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from test_torch_runtime import exportable, run_all, searched
from world import World

from vpipe.schedules.size import default_placement


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_torch_runs_every_schedule_of_ours(ranks: int, forked: None, tmp_path: Path) -> None:
    world = World(ranks, tmp_path)
    try:
        for microbatches in (2, ranks, 2 * ranks + 1, 3 * ranks):
            schedules = dict(exportable(ranks, microbatches, more_chunks=(2, 3, 4)))
            assert {"1f1b_1", "zb_h1_1"} <= schedules.keys()
            run_all(world, {**schedules, "searched": searched(default_placement(ranks), microbatches)}, tmp_path)
    finally:
        world.close()
