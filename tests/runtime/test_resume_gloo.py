"""Runs that go on over another transport: in one process, then in four over gloo, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import losses, metrics, write_config
from torch import Tensor
from world import World

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.resume import ResumePoint, find_resume_point, prepare_run, resumed_config, run_config
from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import Manifest

pytestmark = pytest.mark.jobs


def train_in(*, folder: str, checkpoint: str | None) -> str | None:
    """Train as the config in a run's folder says."""
    return train(Job.from_config(load_config(Path(folder) / "config.yaml")), Path(folder),
                 None if checkpoint is None else ResumePoint(Path(folder), Path(checkpoint)))


CHANGES = {"checkpoint__every_steps": 3, "checkpoint__keep": None, "training__max_steps": 8, "checkpoint__at_end": True,
           "training__evaluate_every": 4, "training__average": 0.9}


def begin(folder: Path, world: World | None = None, **changes: Any) -> Path:
    """A run from its first step, in this process or in the world; its folder."""
    folder.mkdir()
    job = Job.from_config(load_config(write_config(folder, **{**CHANGES, **changes})))
    run = prepare_run(ResumePoint(None, None), job)
    go(run, None, world)
    return run


def go_on(run: Path, *settings: str, at: int, world: World | None = None) -> None:
    start = find_resume_point(run / "checkpoints" / f"step-{at}")
    prepare_run(start, Job.from_config(resumed_config(start, None, settings)))
    go(run, start.checkpoint, world)


def go(run: Path, checkpoint: Path | None, world: World | None) -> None:
    if world is None:
        train(Job.from_config(load_config(run / "config.yaml")), run, ResumePoint(run, checkpoint))
    else:
        said = world.run(train_in, folder=str(run), checkpoint=None if checkpoint is None else str(checkpoint))
        assert said == [None] * 4


def check_equal(one: Path, other: Path, step: int = 8) -> None:
    assert losses(one) == losses(other)
    for key in ("evaluation_loss", "evaluation_loss_averaged"):
        assert [line[key] for line in metrics(one)[1]] == [line[key] for line in metrics(other)[1]]
    mine, theirs = (tensors(run / "checkpoints" / f"step-{step}") for run in (one, other))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def tensors(folder: Path) -> dict[str, Tensor]:
    manifest = Manifest.load(folder)
    return Checkpoint(folder, manifest).tensors(manifest.tensors)


def test_with_a_flush_four_ranks_go_on_with_a_run_of_one_stage_and_back(world: World, tmp_path: Path) -> None:
    flush = {"parallel__model_parallel_size": 1, "parallel__partition": [5], "training__lr_policy": "cosine",
             "model__tie_weights": False}
    whole, run = begin(tmp_path / "a", **flush), begin(tmp_path / "b", **flush)
    go_on(run, "parallel.partition=[1, 1, 1, 2]", "parallel.schedule=gpipe", at=3, world=world)
    files = sorted(path.name for path in (run / "checkpoints" / "step-8").iterdir())
    assert files == ["checkpoint.json", *(f"rank{rank}.safetensors" for rank in range(4))]
    go_on(run, "parallel.partition=[5]", at=6)
    check_equal(whole, run)


def test_without_one_the_same_arrangement_does(world: World, tmp_path: Path) -> None:
    stream = {"parallel__schedule": "pipedream", "parallel__model_parallel_size": 4, "parallel__update_every": 2,
              "parallel__compress": "int8"}
    whole, run = begin(tmp_path / "a", **stream), begin(tmp_path / "b", world, **stream, training__max_steps=6)
    assert losses(run) == losses(whole)[:6]
    go_on(run, "training.max_steps=8", at=3, world=world)
    check_equal(whole, run)


def test_four_ranks_agree_how_many_updates_the_minutes_between_checkpoints_are(world: World, tmp_path: Path) -> None:
    stream = {"parallel__schedule": "pipedream", "parallel__model_parallel_size": 4, "parallel__update_every": 1,
              "training__max_steps": 25}
    run = begin(tmp_path / "a", world, **stream, checkpoint__every_steps=None, checkpoint__every_minutes=1e-4)
    every = run_config(run).saving.every_steps
    assert every is not None
    assert 12 <= every < 25, "none is in flight when the first is known"
    whole = begin(tmp_path / "b", **stream, checkpoint__every_steps=every)
    check_equal(whole, run, 25)
