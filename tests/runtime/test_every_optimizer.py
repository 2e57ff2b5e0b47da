"""Every optimizer of a config, under every method of training, computes what the oracle says, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from models import rich_batches, rich_model, untied_model
from oracles import DECAY_AND_CLIP, equals_its_oracle, pipeline_of
from test_exact_in_every_precision import pushed, pushed_model

from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.model.model import Model

NAMES = ("nadam", "muon")


def settings(name: str, model: Model) -> OptimizerSettings:
    return OptimizerSettings(name, 0.01, weight_decay=0.1,
                             matrices=hidden_matrices(model) if name == "muon" else None)


EXTRAPOLATED = {"delay_correction": 1.0}
REPLICAS = {"partition": [2, 4, 2], "placement": [[0, 1], [2], [3, 4, 5]]}


@pytest.mark.parametrize(("names", "precision", "arguments"), [
    ("nadam muon", "fp32", {"schedule": "1f1b", "recompute": 0.5, **REPLICAS}),
    ("muon", "fp32", {"schedule": "pipedream", "recompute": 0.5, **REPLICAS}),
    ("nadam muon", "fp32", {"schedule": "pipedream", "partition": [2, 2, 2, 2], "update_every": 2, **EXTRAPOLATED}),
    ("nadam", "bf16", {"schedule": "pipedream_vertical_sync", "partition": [1, 5, 2]}),
    ("muon", "bf16", {"schedule": "zb_v", "partition": [2, 2, 2, 2], "executor": "naive"}),
    ("muon", "bf16_pure", {"schedule": "2bw", "partition": [3, 3, 2], "update_every": 4, **EXTRAPOLATED}),
    pytest.param("nadam", "bf16_pure", {"schedule": "gpipe", "partition": [3, 5], "executor": "async_threaded"},
                 marks=pytest.mark.extras("async_threaded")),
    ("nadam muon", "fp16", {"schedule": "pipedream", "recompute": 1.0, "loss_scale": 1024, **REPLICAS})])
def test_equals_its_oracle(names: str, precision: str, arguments: dict[str, Any]) -> None:
    """Every optimizer in every precision, with a flush and without; ties, clipping, a learning rate that falls; the
    last update of a stage may be incomplete."""
    for name in names.split():
        equals_its_oracle(rich_model, rich_batches(3, 8), optimizer=settings(name, rich_model()), precision=precision,
                          **DECAY_AND_CLIP, **arguments)


@pytest.mark.parametrize(("name", "schedule", "placement"), [
    ("nadam", "zb_h1", None), ("muon", "pipedream", [[0, 1], [2]])])
def test_updates_that_overflow(name: str, schedule: str, placement: list[list[int]] | None) -> None:
    _, steps = equals_its_oracle(
        pushed_model, pushed([20.0, 1.0, 4000.0, 1.0]), optimizer=settings(name, pushed_model()), precision="fp16",
        loss_scale=4096, schedule=schedule, partition=[2, 4], placement=placement, **DECAY_AND_CLIP)
    assert any(step.skipped for step in steps)


@pytest.mark.parametrize("name", NAMES)
def test_another_partition_with_a_flush_changes_nothing(name: str) -> None:
    optimizer, runs = settings(name, untied_model()), []
    for partition in ([8], [1, 1, 6], [3, 3, 2]):
        pipe = pipeline_of(untied_model, optimizer=optimizer, schedule="1f1b", partition=partition, **DECAY_AND_CLIP)
        runs.append([step.loss for step in pipe.train(rich_batches(3, 8))])
    assert runs[0] == runs[1] == runs[2]
