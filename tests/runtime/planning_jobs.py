"""Jobs for a test world: planning together, and comparing the ranks while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from vpipe.app.config.config import load_config
from vpipe.app.errors import PlanningError
from vpipe.app.train.job import Job
from vpipe.app.train.load_balance import BalanceCheck
from vpipe.app.train.loop import build_pipeline
from vpipe.app.train.metrics import Metrics, StepSize
from vpipe.app.train.observers import Run
from vpipe.app.train.planning import plan_job
from vpipe.plan.profile import Profile


def plan_and_compare(*, config: str, profile: str, steps: int) -> dict[str, Any]:
    """The plan that each rank gets of a profile, which only the first may read, and the lines that each then says."""
    folder = Path(config).parent

    def profile_job(job: Job, sizes: list[int], **_: Any) -> dict[int, Profile | None]:
        return {size: Profile.load(profile) if dist.get_rank() == 0 else None for size in sizes}

    lines: list[str] = []
    with patch("vpipe.app.train.planning.profile_job", profile_job), \
            patch.multiple("vpipe.app.train.load_balance", ALLOWED=-1.0, WARM_UP=1, MEASURED=2):
        try:
            job = plan_job(Job.from_config(load_config(Path(config))), folder)
        except PlanningError as error:
            return {"error": str(error), "status": error.exit_status}
        pipe = build_pipeline(job)
        balance = BalanceCheck(Run(job, pipe, folder, Metrics(None, StepSize(1, 1)), lines.append))
        for step in pipe.engine.train(job.training_batches(tuple(job.model.batch)), steps):
            balance.step(step.index + 1)
        balance.end()
    return {"partition": job.partition, "lines": [line.split(" works ")[0][:19] for line in lines]}
