"""A run small enough for a test: its config, what it wrote, and what the oracle says it must compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from vpipe.app.config.config import load_config
from vpipe.app.families.registry import Family, ModelSettings
from vpipe.app.train.job import Job
from vpipe.model.model import Model
from vpipe.testing import ReferenceRun, TrainingRecipe, asynchronous_oracle, flush_oracle

SMALL: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "bert", "preset": "tiny", "hidden_size": 16, "sequence_length": 16, "vocab_size": 32},
    "dataset": {"name": "synthetic", "batch_size": 8, "samples": 64},
    "training": {"learning_rate": 0.01, "max_steps": 4, "num_microbatches": 4},
    "parallel": {"model_parallel_size": 2, "schedule": "1f1b"},
    "checkpoint": {"at_end": False, "every_minutes": None},
    "metrics": {"peak_tflops": 1.0}}
"""BERT with 2 blocks = 5 layers, dropout 0.1 and a tied head; 8 batches an epoch; nothing is saved, and no peak is
measured, which takes longer than such a run."""


def write_config(folder: Path, **changes: Any) -> Path:
    """``c.yaml`` in ``folder``, whose runs go to ``runs`` there; ``training__epochs=2`` changes a key.

    The stages have about as many layers each: a partition that is left to the run has it measure first.
    """
    config: dict[str, Any] = {section: dict(keys) for section, keys in SMALL.items()}
    config["log_directory"] = str(folder / "runs")
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        config[section][leaf] = value
    layers, stages = 2 * config["model"].get("num_layers", 2) + 1, config["parallel"]["model_parallel_size"]
    if stages <= layers:
        even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        config["parallel"].setdefault("partition", even)
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def job_of(folder: Path, **changes: Any) -> Job:
    return Job.from_config(load_config(write_config(folder, **changes)))


def put_in(monkeypatch: pytest.MonkeyPatch, model: Model,
           flops: Callable[[ModelSettings], Sequence[int]] | None = None) -> None:
    """A model in place of the config's, whatever its settings."""
    family = Family(lambda settings: model, flops=flops)
    monkeypatch.setattr("vpipe.app.train.job.family_named", lambda name: family)
    monkeypatch.setattr("vpipe.app.train.model_section.family_named", lambda name: family)


def only_run(runs: Path) -> Path:
    """The folder of the one run there."""
    [run] = runs.iterdir()
    return run


def metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of updates, and those of evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "evaluation_loss" in line]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)[0]]


def check_updates(run: Path, count: int | None = None) -> None:
    """Every update has its line, in order, with the promised keys."""
    updates, evaluations = metrics(run)
    assert [line["step"] for line in updates] == list(range(len(updates) if count is None else count))
    assert updates
    for line in updates:
        assert {"step", "loss", "learning_rate", "time_s", "tokens_per_s"} <= set(line)
        assert line["tokens_per_s"] > 0
        assert line["learning_rate"] >= 0
    times = [line["time_s"] for line in updates]
    assert times == sorted(times)
    assert evaluations[-1]["step"] == updates[-1]["step"]


def oracle(job: Job, updates: int, drained_at: tuple[int, ...] = ()) -> ReferenceRun:
    """What a sequential program computes for the first ``updates`` of a job."""
    config = job.config
    fields, per_step = tuple(job.dataset.fields), job.schedule.assignment.step_microbatches
    count = -(-updates * per_step // config.training.num_microbatches)
    batches = list(islice(job.training_batches(fields), count))
    recipe = TrainingRecipe(job.optimizer.from_named, config.training.num_microbatches, seed=config.training.seed,
                    factor=job.lr_policy(), clip=config.training.grad_clip,
                    extrapolation=config.training.extrapolation,
                    labels=job.model.labels if config.training.per_token_loss else None, slices=config.parallel.slices)
    partition = job.cut.partition
    if not config.parallel.asynchronous:
        return flush_oracle(job.model, batches, recipe, partition=partition)
    return asynchronous_oracle(job.model, batches, recipe, partition, config.parallel.update_every, drained_at)
