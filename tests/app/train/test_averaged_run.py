"""``training.average``: evaluated beside the weights, kept in checkpoints, exported, and resumed under another cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attempts import begin, go_on
from made_profile import made_profile
from safetensors.torch import load_file
from small_run import losses, metrics
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.checkpoint import Checkpoint, Checkpoints
from vpipe.testing import evaluate_oracle

AVERAGE = 0.75


def exported(run: Path, at: int, *options: str) -> dict[str, Tensor]:
    out = run / f"{len(list(run.iterdir()))}.safetensors"
    assert main(["checkpoint", "export", str(run / "checkpoints" / f"step-{at}"), "--format", "safetensors", "-o",
                 str(out), *options]) == 0
    return load_file(out)


def test_an_average_follows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the first weights on, over every update, by torch's own step; resumed in the middle with other stages."""
    run = begin(tmp_path, training__average=AVERAGE, training__evaluate_every=2, checkpoint__every_steps=1,
                checkpoint__keep=None, checkpoint__at_end=True)
    job = Job.from_config(load_config(run / "config.yaml"))
    assert job.with_correction(made_profile(3)).averages, "plans know of its memory"
    tied = {f"{layer.name}.{own}" for layer in job.model.layers for own in layer.ties}
    average = {name: value for name, value in job.model.materialize().state_dict().items() if name not in tied}
    for step in range(1, 5):
        weights = exported(run, step)
        get_ema_multi_avg_fn(AVERAGE)(list(average.values()), [weights[name] for name in average], 1)
    found = exported(run, 4, "--averaged")
    assert [name for name, value in average.items() if not torch.equal(found[name], value)] == []
    lines = metrics(run)[1]
    assert [line["evaluation_loss"] == line["evaluation_loss_averaged"] for line in lines] == [False, False]
    batches = list(job.evaluation_batches(tuple(job.dataset.fields)))
    whole = found | {name: found[job.model.ties[name]] for name in tied}
    assert lines[-1]["evaluation_loss_averaged"] == evaluate_oracle(job.model, whole, batches, 4)
    said = [f"; with averaged weights {line.pop('evaluation_loss_averaged'):.4f}" for line in lines]
    assert said[1] in capsys.readouterr().out

    before = losses(run)
    go_on(run, "parallel.model_parallel_size=3", "parallel.partition=[1,2,2]", at=2)
    assert losses(run) == before
    assert Checkpoint.open(Checkpoints.find(run)).manifest.arrangement["partition"] == [1, 2, 2]
    assert all(torch.equal(value, found[name]) for name, value in exported(run, 4, "--averaged").items())
    text = capsys.readouterr().out
    assert [what in text for what in said] == [True, True], "also of the attempt before"
