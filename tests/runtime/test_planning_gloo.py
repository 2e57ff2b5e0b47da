"""Four processes plan together: all get the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from small_run import write_config
from world import World

from vpipe.app.config.config import load_config
from vpipe.app.errors import StartError
from vpipe.app.train.job import Job
from vpipe.app.train.planning import plan_job
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes

pytestmark = pytest.mark.jobs


def plan(*, config: str, profile: str) -> dict[str, Any]:
    """The partition that each rank gets of a profile, which only the first may read."""
    def profile_job(job: Job, sizes: list[int], **_: Any) -> dict[int, Profile | None]:
        return {size: Profile.load(profile) if dist.get_rank() == 0 else None for size in sizes}

    with patch("vpipe.app.train.planning.profile_job", profile_job):
        try:
            job = Job.from_config(load_config(Path(config)))
            return {"partition": plan_job(job, Path(config).parent).cut.partition}
        except StartError as error:
            return {"error": str(error), "status": error.exit_status}


def profile(tmp_path: Path, latency_s: float = 1e-5) -> str:
    """Nine layers; the third takes as long as four others."""
    layers = []
    for number in range(9):
        time = Seconds(0.004 if number == 2 else 0.001)
        layers.append(LayerProfile(
            f"layer{number}", time, time, time, time, time, Seconds(1e-6), 1000, 2000, ("input_ids",) if number == 0
            else ("h",), (TensorBytes("loss" if number == 8 else "h", 1000, True),), 10**6, (), 1000, 100, {}, 10**6,
            number))
    identity = Identity("m", "bert", 9, 2, "adamw", "a processor", 1, 4, "gloo", "2")
    path = tmp_path / "of_nine.json"
    Profile(identity, tuple(layers), {"input_ids": 1000}, LinkProfile(latency_s, 1e9), device_bytes=10**9).save(path)
    return str(path)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_all_ranks_get_the_same_plan(world: World, tmp_path: Path, schedule: str) -> None:
    ahead = {"parallel__warmup_depth": "auto"} if schedule == "pipedream" else {}
    config = write_config(tmp_path, model__num_layers=4, parallel__model_parallel_size=4, parallel__schedule=schedule,
                          parallel__partition="auto", **ahead)
    found = world.run(plan, config=str(config), profile=profile(tmp_path, 2e-3))
    made = Plan.load(tmp_path / "plan.json")
    if ahead:
        assert made.warmup > (3, 2, 1, 0)
        assert load_config(tmp_path / "config.yaml").parallel.warmup_depth == made.warmup
    assert made.partition[0] <= 3
    assert [rank["partition"] for rank in found] == [list(made.partition)] * 4
    assert load_config(tmp_path / "config.yaml").parallel.partition == made.partition


def test_all_ranks_hear_that_nothing_fits(world: World, tmp_path: Path) -> None:
    config = write_config(tmp_path, model__num_layers=4, parallel__model_parallel_size=4, parallel__partition="auto",
                          parallel__memory="100kB")
    found = world.run(plan, config=str(config), profile=profile(tmp_path))
    assert found[0]["status"] == 2
    assert "no plan fits into 97.7 KiB per rank" in found[0]["error"]
    assert found == [found[0]] * 4
