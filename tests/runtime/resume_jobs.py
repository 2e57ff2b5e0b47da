"""Jobs for a test world: training with checkpoints."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from torch._C._distributed_c10d import PrefixStore

from vpipe.config.config import load_config
from vpipe.distributed.rendezvous import own_store
from vpipe.train.job import Job
from vpipe.train.loop import train


def train_in(*, folder: str, checkpoint: str | None, notes: str) -> str | None:
    """Train as the config in a run's folder says.

    Args:
        notes: a name of its own for the ranks' notes about checkpoints: this world serves several runs.
    """
    def store(kind: str, rank: int, ranks: int, timeout_s: float) -> PrefixStore:
        return own_store(f"{kind} {notes}", rank, ranks, timeout_s)

    with patch("vpipe.train.checkpointing.own_store", store):
        return train(Job.from_config(load_config(Path(folder) / "config.yaml")), Path(folder),
                     None if checkpoint is None else Path(checkpoint))
