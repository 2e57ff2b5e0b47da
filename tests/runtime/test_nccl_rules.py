"""Under nccl's rules four processes compute what one process does, bit for bit, and none waits for ever."""

from __future__ import annotations

from typing import Any

import jobs
import nccl_jobs
import pytest
from world import World

from vpipe.schedules.registry import recipe_named, schedule_names

RULES = [{"eager": eager, "buffered": buffered} for eager in (False, True) for buffered in (False, True)]


def equal_under_rules(world: World, rules: dict[str, bool], job: str = "jobs.train", **arguments: Any) -> Any:
    """Run the job here and on every rank under the rules; all tell the same."""
    expected = getattr(jobs, job.rpartition(".")[2])(**arguments)
    for rank, result in enumerate(world.run(nccl_jobs.under, run=job, **rules, **arguments)):
        assert result == expected, f"rank {rank}"
    return expected


@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.parametrize("rules", RULES)
def test_every_schedule_equals_one_process(world: World, schedule: str, rules: dict[str, bool]) -> None:
    stages = 4 * recipe_named(schedule).chunks
    equal_under_rules(world, rules, model="rich", schedule=schedule, microbatches=8, batches=2,
                      partition=[8 // stages] * stages, recompute=0.5, grad_clip=0.5)
