"""TensorBoard's events, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import job_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vpipe.app.train import event_writers as module
from vpipe.app.train.event_writers import FOLDER, TensorBoardWriter
from vpipe.app.train.loop import train
from vpipe.app.train.metrics import Metrics, StepSize
from vpipe.errors import UserError


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(run / FOLDER))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_events_are_what_the_lines_say(tmp_path: Path) -> None:
    job = job_of(tmp_path, metrics__tensorboard=True, metrics__peak_tflops=1.0, training__grad_clip=1.0)
    train(job, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = scalars(tmp_path)
    for key in ("loss", "tokens_per_s", "step_s", "mfu", "gradient_norm", "evaluation_loss"):
        said = [(line["step"], line[key]) for line in lines if key in line]
        assert said
        assert found[key] == [(step, pytest.approx(value)) for step, value in said]
    assert found["summary/mfu"] == [(3, pytest.approx(lines[-1]["summary"]["mfu"]))]
    assert "summary/bubble" not in found, "ranks that take turns in one process have none"


def test_an_attempt_that_goes_on_replaces_what_was_said_of_its_steps(tmp_path: Path) -> None:
    for first, values in ((0, range(6)), (4, range(40, 43))):
        events = TensorBoardWriter(tmp_path, first)
        for step, value in enumerate(values, first):
            events.line({"step": step, "loss": float(value), "skipped": True, "checkpoint": None})
        events.close()
    assert scalars(tmp_path)["checkpoint/loss"] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40), (5, 41), (6, 42)]


def test_a_full_disk_ends_the_events_and_not_the_training(tmp_path: Path) -> None:
    events = TensorBoardWriter(tmp_path, 0)
    with Metrics(None, StepSize(1, 1), events=[events]) as metrics:
        metrics.evaluation(0, 2.0)
        assert metrics.warnings() == []
        events._records._writer.close()
        events._records._writer = open("/dev/full", "wb")  # noqa: SIM115 - it is closed with the events
        metrics.evaluation(1, 2.0)
        metrics.evaluation(2, 2.0)
        assert metrics.warnings() == ["cannot write TensorBoard events: No space left on device; training continues "
                                      "without them"]
        assert metrics.warnings() == []
    assert scalars(tmp_path)["evaluation_loss"] == [(0, 2.0)]


def test_without_the_package_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"(?s)'tensorboard' is not installed.*pip install 'vpipe\[tensorboard\]'"):
        job_of(tmp_path, metrics__tensorboard=True)
    job_of(tmp_path)
