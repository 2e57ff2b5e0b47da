"""Every schedule that torch.distributed.pipelining can run of ours, in many sizes; see tests/runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from test_torch_runtime import exportable, run_all, searched
from world import World

from vpipe.schedules.size import Layout


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (2, 6), (3, 3), (3, 7), (5, 10)])
def test_torch_runs_every_schedule_of_ours(ranks: int, microbatches: int, forked: None, tmp_path: Path) -> None:
    schedules = {**dict(exportable(ranks, microbatches, more_chunks=(2, 3, 4))),
                 "searched": searched(Layout.LOOP(ranks), microbatches)}
    assert {"1f1b_1", "zb_h1_1"} <= schedules.keys()
    world = World(ranks, tmp_path)
    try:
        for name, schedule in schedules.items():  # a job each: a world gives each a time
            run_all(world, {name: schedule}, tmp_path)
    finally:
        world.close()
