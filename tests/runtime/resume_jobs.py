"""Jobs for a test world: training with checkpoints."""

from __future__ import annotations

from pathlib import Path

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train


def train_in(*, folder: str, checkpoint: str | None) -> str | None:
    """Train as the config in a run's folder says."""
    return train(Job.from_config(load_config(Path(folder) / "config.yaml")), Path(folder),
                 None if checkpoint is None else Path(checkpoint))
