"""Runs with a process per stage, through the command: what they compute, write and say."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from small_run import check_updates, losses, metrics, only_run, oracle, write_config

from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job

pytestmark = [pytest.mark.jobs, pytest.mark.usefixtures("forked")]

FRAGILE = """\
from vpipe.app.families.bert import bert_from_settings
from vpipe.model.layer import Layer
from vpipe.model.model import Model
from vpipe.app.families.registry import register_model
from torch import nn


class Breaks(nn.Module):
    calls = 0

    def forward(self, h):
        self.calls += 1
        if self.calls == 6:
            raise ArithmeticError("too hot to handle")
        return h


@register_model("fragile")
def fragile(settings):
    good = bert_from_settings(settings)
    layers = [*good.layers[:3], Layer("breaks", Breaks, inputs=("h",), outputs=("h",)), *good.layers[3:]]
    return Model(layers, batch=good.batch)
"""


@pytest.mark.parametrize("changes", [
    {"parallel__schedule": "1f1b", "parallel__model_parallel_size": 3, "training__grad_clip": 0.5,
     "training__evaluate_every": 2, "parallel__stage_to_rank_map": {"0": [2], "1": [0], "2": [1]}},
    {"parallel__schedule": "pipedream", "parallel__model_parallel_size": 3, "parallel__update_every": 2,
     "training__max_steps": 11, "training__evaluate_every": 6, "parallel__recompute": [1.0, 0.5, 0.0]},
], ids=["1f1b-permuted", "pipedream"])
def test_a_run(tmp_path: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, **changes)
    assert main(["train", str(config)]) == 0
    out, err = capfd.readouterr()
    run = only_run(tmp_path / "runs")
    lines = out.splitlines()
    assert lines[0] == lines[-1] == f"run folder: {run}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run.name)
    assert "error" not in out + err

    job = Job.from_config(load_config(config))
    count, stages = job.config.training.max_steps, job.config.parallel.model_parallel_size
    assert count is not None
    check_updates(run, count)
    evaluated = [line["step"] for line in metrics(run)[1]]
    drained = tuple(2 * (step + 1) for step in evaluated[:-1])
    assert losses(run) == oracle(job, count, drained if job.config.parallel.asynchronous else ()).losses[:count]
    assert evaluated[-1] == count - 1
    assert len(evaluated) == (2 if job.config.training.evaluate_every else 1)
    assert load_config(run / "config.yaml") == job.config
    assert sorted(path.name for path in run.iterdir()) == sorted(
        ["config.yaml", "metrics.jsonl", "origin.json", "rank_times.jsonl", "run.json", "summary.csv",
         *(f"rank{rank}.log" for rank in range(stages))])
    for rank in range(stages):
        log = (run / f"rank{rank}.log").read_text()
        [stage] = [s for s, ranks in enumerate(job.schedule.placement) if rank in ranks]
        assert f"stages [{stage}]" in log
        assert f"update {count}/{count}: loss " in log
        assert f"rank {rank} has ended" in log
    assert f"{count} updates in " in out
    assert f"evaluation loss after {count} updates: " in out


def test_a_time_limit_ends_all_ranks_after_the_same_update(tmp_path: Path) -> None:
    config = write_config(tmp_path, training__max_steps=None, training__max_minutes=0.005,
                          parallel__schedule="pipedream", parallel__update_every=2)
    assert main(["train", str(config)]) == 0
    check_updates(only_run(tmp_path / "runs"))


def test_a_failure_in_a_rank_is_told_once_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capfd: pytest.CaptureFixture[str]) -> None:
    """The model comes from an installed package, and breaks in the second update."""
    package = tmp_path / "site"
    (package / "fragile-1.0.dist-info").mkdir(parents=True)
    (package / "fragile.py").write_text(FRAGILE)
    (package / "fragile-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (package / "fragile-1.0.dist-info" / "entry_points.txt").write_text("[vpipe.models]\nfragile = fragile\n")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
    config = write_config(tmp_path, model__name="fragile", parallel__partition=[3, 3],
                          parallel__stage_to_rank_map={"0": [1], "1": [0]})
    assert main(["train", str(config)]) == 1
    out, err = capfd.readouterr()
    run = only_run(tmp_path / "runs")
    number = 1 + FRAGILE.splitlines().index('            raise ArithmeticError("too hot to handle")')
    lines = err.splitlines()
    assert lines[lines.index(next(line for line in lines if line.startswith("error:"))):] == [
        "error: the forward of layer 3 'breaks' on h float32[2, 16, 16] raised ArithmeticError: too hot to handle "
        "(rank 0, stage 1, microbatch 5, action 1F1)",
        f'  File "{package}/fragile.py", line {number}, in forward',
        '    raise ArithmeticError("too hot to handle")',
        "hint: make the layer accept these inputs, or change the outputs of the layers before it; "
        f"the traceback is in {run}/rank0.log; no checkpoint was made: checkpoint.every_minutes is null"]
    assert (out + err).count("error:") == 1
    assert "Traceback" not in out + err
    assert out.splitlines()[-1] == f"run folder: {run}"
    assert "raise ArithmeticError" in (run / "rank0.log").read_text()
    assert len(losses(run)) == 1


@pytest.mark.parametrize(("changes", "place"), [
    ({"schedule": "1f1b"}, "stage 1, microbatch 4"),
    ({"schedule": "pipedream", "model_parallel_size": 1, "data_parallel_size": 2}, "stage 0, microbatch 2")])
def test_a_loss_that_is_not_finite_is_told_without_frames(tmp_path: Path, changes: dict[str, Any], place: str,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
    """With its first microbatch, and no lines of vpipe's code."""
    config = write_config(tmp_path, training__learning_rate=1e38,
                          **{f"parallel__{name}": value for name, value in changes.items()})
    assert main(["train", str(config)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[[line.startswith("error:") for line in lines].index(True):] == [
        f"error: loss is nan at step 1 ({place})",
        "hint: lower training.learning_rate, or set training.on_nan: skip; there is no checkpoint before it"]


def test_a_run_with_a_trace_ends_with_its_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path, training__max_steps=1)), "--set", "trace=true"]) == 0
    run = only_run(tmp_path / "runs")
    assert capfd.readouterr().out.endswith(f"run folder: {run}\n{run}/trace.json: open it in Perfetto\n"
                                           f"{run}/report.html: open it in a browser\n")
    assert "<svg" in (run / "report.html").read_text()
