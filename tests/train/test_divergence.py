"""Runs whose numbers are not finite: what ends them, what is saved, what to do then."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from attempts import begin, go_on
from small_run import metrics, only_run

from vpipe.errors import LastingError
from vpipe.pipeline import Pipeline
from vpipe.train import loop


def test_an_evaluation_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(LastingError, match="the evaluation loss is nan after update 1") as caught:
        begin(tmp_path, training__max_steps=1, training__learning_rate=1e38, checkpoint__at_end=True)
    assert caught.value.hint == ("lower training.learning_rate, or set training.on_nan: skip; there is no checkpoint "
                                 "before it")
    run = only_run(tmp_path / "runs")
    assert os.listdir(run / "checkpoints") == []
    assert [line["evaluation_loss"] for line in metrics(run)[1]] == [None]


def test_the_last_good_checkpoint_is_named_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([2.0, float("inf"), 2.0, 2.0])
    monkeypatch.setattr(Pipeline, "evaluate", lambda *_: next(losses))
    folder = tmp_path / "a run"
    with pytest.raises(LastingError, match="the evaluation loss is inf after update 2") as caught:
        begin(folder, training__evaluate_every=1, training__max_steps=3, checkpoint__every_steps=1)
    run = only_run(folder / "runs")
    command = shlex.split(caught.value.hint.partition("go on from step 1, such as: ")[2])
    assert command == ["vpipe", "train", "--resume", f"{run}/checkpoints/step-1", "--set",
                       "training.learning_rate=0.005"]
    job = go_on(run, command[-1], at=1)
    assert job.config.training.learning_rate == 0.005
    assert len(metrics(run)[0]) == 3


def test_skipping_ends_where_nothing_else_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(loop, "MOST_SKIPPED", 2)
    with pytest.raises(LastingError, match="2 updates in a row were skipped; loss is nan at step 2") as caught:
        begin(tmp_path, training__learning_rate=1e38, training__on_nan="skip")
    assert "on_nan" not in caught.value.hint
    assert [line.get("skipped") for line in metrics(only_run(tmp_path / "runs"))[0]] == [None, True, True]
    assert "update 3 was skipped: loss is nan" in capsys.readouterr().err
