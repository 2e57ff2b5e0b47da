"""The loop in one process: what it computes, what it writes, when it ends. With processes: tests/launch."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from attempts import begin, go_on
from small_run import check_updates, job_of, losses, metrics, only_run, oracle, put_in
from torch import Tensor, nn

from vpipe.app.errors import LastingError
from vpipe.app.train import loop
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.resume import find_resume_point, nothing_left, resumed_config
from vpipe.app.train.run_folder import unlock_runs
from vpipe.model.layer import Layer
from vpipe.model.model import Model
from vpipe.pipeline import Pipeline
from vpipe.testing import evaluate_oracle

ASYNCHRONOUS = {"parallel__schedule": "pipedream", "parallel__update_every": 2}
"""Batches of 4 microbatches: two updates each."""


def run(folder: Path, **changes: Any) -> Job:
    job = job_of(folder, **changes)
    train(job, folder)
    return job


@pytest.mark.parametrize("changes", [
    {"parallel__schedule": "gpipe"},
    {"parallel__schedule": "gpipe", "parallel__recompute": 1.0, "training__optimizer": "lamb"},
    {"parallel__schedule": "1f1b", "training__grad_clip": 0.5, "parallel__model_parallel_size": 3},
    {"parallel__schedule": "pipedream", "training__num_microbatches": 1, "parallel__model_parallel_size": 4},
    {"parallel__schedule": "pipedream", "training__num_microbatches": None, "parallel__model_parallel_size": 4},
    {**ASYNCHRONOUS, "training__max_steps": 5},
    {**ASYNCHRONOUS, "training__max_steps": 5, "parallel__update_every": 4, "training__lr_policy": "polynomial",
     "training__warmup_steps": 2},
    {"parallel__schedule": "1f1b", "model__name": "gpt", "model__preset": None, "model__num_layers": 2,
     "model__num_heads": 2, "model__packed": True, "training__per_token_loss": True},
    {"parallel__schedule": "seq1f1b", "parallel__slices": 3, "model__name": "qwen3", "model__preset": None,
     "model__num_layers": 2, "model__num_heads": 2, "model__packed": True, "model__dropout": 0.1},
], ids=["gpipe", "gpipe-recompute", "1f1b-clip", "pipedream", "pipedream-updates-of-a-batch",
        "pipedream-2-updates-a-batch", "pipedream-every-4", "packed-per-token", "seq1f1b"])
def test_losses_are_the_oracles(tmp_path: Path, changes: dict[str, Any]) -> None:
    job = run(tmp_path, **changes)
    count = job.config.training.max_steps
    assert count is not None
    check_updates(tmp_path, count)
    expected = oracle(job, count)
    assert losses(tmp_path) == expected.losses[:count]
    policy = job.lr_policy()
    assert [line["learning_rate"] for line in metrics(tmp_path)[0]] == [0.01 * policy(i) for i in range(count)]
    if job.config.training.grad_clip is not None:
        norms = [line["gradient_norm"] for line in metrics(tmp_path)[0]]
        assert norms == pytest.approx(expected.gradient_norms, rel=1e-6)


class AsNumbers(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids.float() / 32


class Score(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h).square().mean()


def test_the_learning_rate_is_told_when_the_first_stage_has_nothing_to_train(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Layer("start", AsNumbers, inputs=("input_ids",), outputs=("h",)),
                   Layer("end", lambda: Score(16, 1), inputs=("h",), outputs=("loss",))], batch=("input_ids",))
    put_in(monkeypatch, model)
    run(tmp_path, parallel__partition=[1, 1])
    check_updates(tmp_path, 4)
    assert {line["learning_rate"] for line in metrics(tmp_path)[0]} == {0.01}


@pytest.mark.parametrize("changes", [
    {"parallel__schedule": "gpipe"}, {**ASYNCHRONOUS, "parallel__model_parallel_size": 3},
    {**ASYNCHRONOUS, "training__max_steps": None}])
def test_a_time_limit_leaves_no_gap(tmp_path: Path, changes: dict[str, Any]) -> None:
    job = run(tmp_path, **{"training__max_steps": 100, **changes}, training__max_minutes=1e-6)
    check_updates(tmp_path)
    assert len(losses(tmp_path)) < 20
    assert losses(tmp_path) == oracle(job, len(losses(tmp_path))).losses[:len(losses(tmp_path))]


@pytest.mark.parametrize("samples", [64, 72])
def test_evaluation_every_few_updates_and_at_the_end(tmp_path: Path, samples: int) -> None:
    """Of 8 or 9 held-out samples in batches of 8, which have 4 microbatches."""
    job = run(tmp_path, training__evaluate_every=2, training__max_steps=5, dataset__samples=samples)
    _, evaluations = metrics(tmp_path)
    assert [line["step"] for line in evaluations] == [1, 3, 4]
    computed = oracle(job, 5)
    assert losses(tmp_path) == computed.losses
    batches = list(job.evaluation_batches(tuple(job.dataset.fields)))
    assert [len(batch["input_ids"]) for batch in batches] == ([8] if samples == 64 else [8, 1])
    assert evaluations[-1]["evaluation_loss"] == evaluate_oracle(job.model, computed.state, batches, 4)


@pytest.mark.parametrize("updates", [11, 12])
def test_an_asynchronous_pipeline_runs_empty_exactly_where_it_evaluates(tmp_path: Path, updates: int) -> None:
    job = run(tmp_path, **ASYNCHRONOUS, parallel__model_parallel_size=4, training__evaluate_every=4,
              training__max_steps=updates, training__delay_correction="none" if updates == 11 else "extrapolate")
    check_updates(tmp_path, updates)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    _, evaluations = metrics(tmp_path)
    after = [line["step"] for line in evaluations]
    assert after == [3, 7, updates - 1]
    for number, evaluation in enumerate(evaluations):  # the lines stand where they belong
        assert f'"step": {evaluation["step"]}' in lines[evaluation["step"] + number]
    drained_at = tuple(2 * (step + 1) for step in after[:-1])
    assert losses(tmp_path) == oracle(job, updates, drained_at).losses[:updates]


def test_too_few_microbatches_are_said_once_in_the_configs_words(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, training__num_microbatches=1, training__max_steps=1)
    assert capsys.readouterr().err.splitlines()[0] == (
        "warning: 1 microbatch for 2 stages leaves ranks without work; raise training.num_microbatches, at best to 8")


def test_the_delay_of_gradients_is_said_and_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, parallel__schedule="pipedream", training__num_microbatches=1, training__max_steps=1,
        parallel__model_parallel_size=4)
    said = capsys.readouterr()
    assert said.out.splitlines()[3] == (
        "an update: 8 samples in 1 microbatch; delay of gradients in updates, by stage: mean 3 2 1 0, greatest 3 2 1 0")
    assert said.err.splitlines()[0] == (
        "warning: the gradients of stage 0 are 3 updates late on average, so each update lowers the loss less; better "
        "are: training.num_microbatches 4 and parallel.update_every 4 (0.75 updates late; an update is then 8 "
        "samples); training.optimizer muon; training.delay_correction extrapolate; fewer stages; a schedule with a "
        "flush, which has no delay")
    run(tmp_path, parallel__schedule="pipedream", training__num_microbatches=1, training__max_steps=1)
    said = capsys.readouterr()
    assert said.out.splitlines()[3] == (
        "an update: 8 samples in 1 microbatch; delay of gradients in updates, by stage: mean 1 0, greatest 1 0; less "
        "with training.num_microbatches 2 and parallel.update_every 2 (0.5 updates late; an update is then 8 samples)")
    assert "late" not in said.err


def test_lines_of_the_screen_and_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vpipe")
    run(tmp_path, training__print_frequency=3)
    out, err = capsys.readouterr()
    shown = err.splitlines()
    assert [line.split(":")[0] for line in shown] == ["update 3/4", "update 4/4", "evaluation loss after 4 updates"]
    assert "tokens/s" in shown[0]
    assert "0:00 left" in shown[1]
    messages = [record.message for record in caplog.records]
    assert (messages[0], messages[2:5]) == ("rank 0 computes on cpu", shown)
    parameters, epoch, device, update, end, *_ = out.splitlines()
    assert parameters.endswith(" parameters, vocabulary of 32")
    assert epoch == "an epoch: 64 samples, 1,024 tokens, 8 updates"
    assert device == "computing on cpu (no GPU is visible)"
    assert update == "an update: 8 samples in 4 microbatches"
    assert end.startswith("4 updates in ")
    assert "evaluation loss after 4 updates" in out


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
    monkeypatch.setattr(Pipeline, "evaluate", lambda *_, **__: next(losses))
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


def test_the_best_is_kept_and_patience_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """So does the run that goes on; which counts the evaluations of all attempts."""
    losses = iter([3.0, 2.0, 2.5, 2.0, 9.9, 2.1])
    monkeypatch.setattr(Pipeline, "evaluate", lambda *_, **__: next(losses))
    run = begin(tmp_path, training__evaluate_every=1, training__patience=2, training__max_steps=9,
                checkpoint__every_steps=3, checkpoint__keep=1, checkpoint__at_end=True)
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-2", "step-4"]
    shown = capsys.readouterr()
    over = "training.patience, 2, is over: no evaluation loss was below 2.000, of update 2, in 2 evaluations"
    assert over in shown.err
    assert "2 kept, the best of step 2, the last of step 4" in shown.out
    start = find_resume_point(run)
    done = nothing_left(start, Job.from_config(resumed_config(start, None, [])))
    assert done == ("nothing is left to do: 4 updates are done, and training.patience, 2, is over; to continue, give a "
                    f"larger limit: vpipe train --resume {run} --set training.patience=4")
    go_on(run, "training.patience=4")
    assert over.replace("2, is", "4, is").replace("in 2", "in 4") in capsys.readouterr().err
    assert len(metrics(run)[0]) == 6
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-2", "step-6"]


def test_a_run_whose_minutes_are_over_is_left_as_it_is(tmp_path: Path) -> None:
    run = begin(tmp_path, training__max_steps=None, training__max_minutes=0.002, checkpoint__at_end=True)
    start = find_resume_point(run)

    def left(*settings: str) -> str | None:
        found = nothing_left(start, Job.from_config(resumed_config(start, None, settings)))
        unlock_runs()
        return found

    assert left() == ("nothing is left to do: training.max_minutes, 0.002, is over; to continue, give a larger limit: "
                      f"vpipe train --resume {run} --set training.max_minutes=0.004")
    assert left("training.max_minutes=3") is left("training.max_minutes=null", "training.max_steps=999") is None
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if '"summary"' not in line).replace(
        '"time_s": 0.', '"time_s": 0.0'))  # killed, or stopped by a signal
    assert left() is None
