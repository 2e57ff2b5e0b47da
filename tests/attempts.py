"""A small run in this process: its first attempt, and those that go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_run import write_config

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.resume import ResumePoint, find_resume_point, prepare_run, resumed_config
from vpipe.app.train.run_folder import unlock_runs


def begin(folder: Path, **changes: Any) -> Path:
    """A run from its first step; its folder."""
    folder.mkdir(exist_ok=True)
    job = Job.from_config(load_config(write_config(folder, **changes)))
    run = prepare_run(ResumePoint(None, None), job)
    train(job, run)
    unlock_runs()
    return run


def go_on(run: Path, *settings: str, at: int | None = None, config: Path | None = None) -> Job:
    """``vpipe train --resume``, from the newest checkpoint or one."""
    start = find_resume_point(run if at is None else run / "checkpoints" / f"step-{at}")
    job = Job.from_config(resumed_config(start, config, settings))
    assert prepare_run(start, job) == run
    train(job, run, start)
    unlock_runs()
    return job
