"""What Weights & Biases is given, by a stand-in for its package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_run import job_of
from torch import nn

from vpipe import Model, Pipeline
from vpipe.app import RecordedRun
from vpipe.app.train import event_writers
from vpipe.app.train.event_writers import WandbWriter
from vpipe.app.train.loop import train
from vpipe.app.train.metrics import Metrics, StepSize
from vpipe.errors import UserError


class StandIn(ModuleType):
    """``wandb`` as far as it is used; it keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.lines: list[dict[str, float]] = []
        self.ended: list[int] = []
        self.id, self.error = "abc123", ""

    def init(self, **options: Any) -> StandIn:
        if self.error:
            raise RuntimeError(self.error)
        self.begun.append(options)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, line: dict[str, float]) -> None:
        if self.error:
            raise ConnectionError(self.error)  # an OSError with a text of its own
        self.lines.append(line)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", found)
    monkeypatch.setattr(event_writers, "find_spec", lambda name: found)
    return found


def test_a_script_passes_its_lines_on_and_that_it_failed(tmp_path: Path, wandb: StandIn) -> None:
    pipe = Pipeline(Model.sequential(nn.Sequential(nn.Linear(3, 2)), nn.MSELoss()), torch.optim.SGD, stages=1)
    run = RecordedRun(pipe, tmp_path / "run", wandb="offline")

    def script() -> None:
        with run:
            for step in run.train([{"input": torch.ones(4, 3), "target": torch.ones(4, 2)}] * 3):
                run.log(own=2.5)
                {0: 0}[step.index]

    with pytest.raises(KeyError):
        script()
    assert [(options["name"], options["mode"]) for options in wandb.begun] == [("run", "offline")]
    assert [line.get("own", "loss" in line) for line in wandb.lines] == [True, 2.5, True, 2.5]
    assert wandb.ended == [1]


def test_it_gets_the_numbers_of_every_line_and_perplexity_of_next_tokens(tmp_path: Path, wandb: StandIn) -> None:
    job = job_of(tmp_path, metrics__wandb="offline", metrics__peak_tflops=1.0, model__name="gpt", model__preset=None,
                 model__num_layers=2, model__num_heads=2)
    train(job, tmp_path)
    [begun] = wandb.begun
    assert (begun["mode"], begun["dir"], begun["name"], begun["id"]) == ("offline", str(tmp_path), tmp_path.name, None)
    assert begun["config"]["training.learning_rate"] == 0.01
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in wandb.lines] == [line["step"] for line in lines]
    assert wandb.lines[:4] == lines[:4]
    assert wandb.lines[0]["perplexity"] == pytest.approx(32, rel=0.2)  # of 32 tokens, before it has learned
    assert wandb.lines[4]["evaluation_perplexity"] == lines[4]["evaluation_perplexity"]
    assert wandb.lines[-1]["summary/mfu"] == lines[-1]["summary"]["mfu"]
    assert wandb.ended == [0]


def test_a_resumed_run_continues_there_and_online_is_left_to_the_environment(tmp_path: Path, wandb: StandIn) -> None:
    for _ in range(2):
        with Metrics(None, StepSize(1, 1), events=[WandbWriter(tmp_path, "online", {})]):
            pass
    assert [(begun["id"], begun["resume"], begun["mode"]) for begun in wandb.begun] == [
        (None, "allow", None), ("abc123", "allow", None)]


def test_an_error_ends_the_lines_and_not_the_training(tmp_path: Path, wandb: StandIn) -> None:
    events = WandbWriter(tmp_path, "online", {})
    metrics = Metrics(None, StepSize(1, 1), events=[events])
    wandb.error = "no network"
    metrics.evaluation(0, 2.0)
    assert metrics.warnings() == ["cannot write Weights & Biases events: no network; training continues without them"]
    wandb.error = ""
    metrics.evaluation(1, 2.0)
    assert metrics.warnings() == []
    with pytest.raises(ZeroDivisionError), metrics:
        raise ZeroDivisionError
    assert (wandb.lines, wandb.ended) == ([], [1])


def test_without_the_package_or_an_account_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          wandb: StandIn) -> None:
    wandb.error = "api_key not configured"
    with pytest.raises(UserError, match=r"(?s)begin a run: api_key not configured.*hint: log in with: wandb login"):
        WandbWriter(tmp_path, "online", {})
    monkeypatch.setattr(event_writers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"(?s)'wandb' is not installed.*pip install 'vpipe\[wandb\]'"):
        job_of(tmp_path, metrics__wandb="online")
