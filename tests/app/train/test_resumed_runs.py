"""A run that was ended goes on as if it had not been: the same losses, weights and learning rates, bit for bit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import begin, go_on
from small_run import check_updates, losses, metrics, oracle, write_config
from torch import Tensor

from vpipe.app.config.config import load_config
from vpipe.app.signals import Stopped
from vpipe.app.train.job import Job
from vpipe.app.train.loop import _TrainingRun, train
from vpipe.app.train.metrics import ProgressBar
from vpipe.app.train.resume import ResumePoint, find_resume_point, prepare_run, resumed_config, run_config
from vpipe.app.train.run_folder import CONFIG
from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import Manifest
from vpipe.distributed.watchdog import watch
from vpipe.runtime.step_results import Step

pytestmark = pytest.mark.jobs

FLUSH = {"checkpoint__every_steps": 3, "checkpoint__keep_best": False, "training__max_steps": 8}
STREAM = {**FLUSH, "parallel__schedule": "pipedream", "parallel__update_every": 2}


class Killed(BaseException):
    """As a process is: nobody is told, nothing is tidied."""


def cut_short(folder: Path, monkeypatch: pytest.MonkeyPatch, after: int, **changes: Any) -> Path:
    """A run that is killed when so many steps are done and the saves before them are complete."""
    recorded = _TrainingRun._record

    def record(self: _TrainingRun, *steps: Step) -> None:
        recorded(self, *steps)
        if self._metrics.steps >= after:
            self._saving.finish()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(_TrainingRun, "_record", record)
        with pytest.raises(Killed):
            begin(folder, **changes)
    [run] = (folder / "runs").iterdir()
    return run


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    """All that a checkpoint of a run holds."""
    folder = run / "checkpoints" / f"step-{step}"
    manifest = Manifest.load(folder)
    return Checkpoint(folder, manifest).tensors(manifest.tensors)


def check_equal(one: Path, other: Path, step: int, only: str = "") -> None:
    """Two runs have the same lines, but for their times, and the same state after a step."""
    for kind in (0, 1):
        said = [[{key: value for key, value in line.items()
                  if not key.endswith("_s") and key not in ("mfu", "hfu")} for line in metrics(run)[kind]]
                for run in (one, other)]
        assert said[0] == said[1]
    mine, theirs = ({name: tensor for name, tensor in tensors(run, step).items() if name.startswith(only)}
                    for run in (one, other))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("changes", [
    {"training__grad_clip": 0.5, "training__lr_policy": "cosine", "training__warmup_steps": 2,
     "training__evaluate_every": 2, "parallel__recompute": 1.0},
    {**STREAM, "training__optimizer": "lamb", "training__delay_correction": "extrapolate",
     "training__evaluate_every": 4, "parallel__model_parallel_size": 3},
    {**STREAM, "parallel__stage_to_rank_map": {"0": [0, 1], "1": [2]}, "parallel__compress": "int8",
     "parallel__update_every": 1, "training__epochs": 1, "training__max_steps": None},
], ids=["flush", "stream", "stream-wide-compressed"])
def test_a_run_that_was_killed_goes_on_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           changes: dict[str, Any]) -> None:
    changes = {**FLUSH, "checkpoint__at_end": True, **changes}
    whole = begin(tmp_path / "whole", **changes)
    killed = cut_short(tmp_path / "killed", monkeypatch, 8, **changes)
    assert sorted(os.listdir(killed / "checkpoints")) == ["latest", "step-3", "step-6"]
    assert len(losses(killed)) >= 8
    job = go_on(killed)
    check_updates(killed, job.updates)
    assert job.updates is not None
    check_equal(whole, killed, job.updates)


@pytest.mark.parametrize("changes", [{}, STREAM, {
    **STREAM, "parallel__stage_to_rank_map": {"0": [0, 1], "1": [2]}, "training__evaluate_every": 4}])
def test_minutes_between_checkpoints_become_a_number_that_repeats_the_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    changes = {**changes, "training__max_steps": 30, "checkpoint__at_end": True, "checkpoint__every_steps": None}
    config = write_config(tmp_path, **changes, checkpoint__every_minutes=1e-4)
    killed = cut_short(tmp_path / "killed", monkeypatch, 25, **changes, checkpoint__every_minutes=1e-4)
    every = run_config(killed).saving.every_steps
    assert every is not None
    assert 5 <= every <= 20
    go_on(killed, config=config)
    assert run_config(killed).saving.every_steps == every, "as the run has measured it"
    whole = begin(tmp_path / "whole", **changes | {"checkpoint__every_steps": every})
    check_equal(whole, killed, 30)
    start = find_resume_point(killed)
    assert resumed_config(start, None, ["checkpoint.every_minutes=5"]).saving.every_steps is None
    assert resumed_config(start, config, ["checkpoint.every_minutes=5"]).saving.every_steps is None


@pytest.mark.parametrize("settings", [
    ["parallel.partition=[1, 4]"], ["parallel.partition=[1, 2, 2]"], ["parallel.partition=[5]"],
    ["parallel.schedule=gpipe", "parallel.recompute=1.0"],
    ["parallel.schedule=zb_v", "parallel.partition=[1, 1, 2, 1]"],
], ids=["another cut", "more stages", "one stage", "gpipe", "zb_v"])
def test_with_a_flush_it_goes_on_so_under_another_arrangement(tmp_path: Path, settings: list[str]) -> None:
    changes = {**FLUSH, "checkpoint__at_end": True, "training__num_microbatches": 1, "model__tie_weights": False}
    whole = begin(tmp_path, **changes)
    expected = {name: tensor.clone() for name, tensor in tensors(whole, 8).items()}
    before = metrics(whole)
    go_on(whole, *settings, at=3)
    assert [line["loss"] for line in metrics(whole)[0]] == [line["loss"] for line in before[0]]
    after = tensors(whole, 8)
    assert after.keys() == expected.keys()
    assert [name for name in after if not torch.equal(after[name], expected[name])] == []


def test_under_another_delay_a_line_says_how_far_the_weights_look_ahead(tmp_path: Path,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path, **STREAM, training__delay_correction="extrapolate", training__num_microbatches=2)
    go_on(run, "parallel.partition=[1, 2, 2]", at=3)
    assert ("warning: the weights look ahead by other factors than in the checkpoint: 0.5 -> 1 in "
            in capsys.readouterr().err)


@pytest.mark.parametrize("changes", [{}, STREAM], ids=["flush", "stream"])
def test_a_run_that_a_signal_stops_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str],
                                                     changes: dict[str, Any]) -> None:
    shown = ProgressBar.update

    def update(self: ProgressBar, step: Step, metrics: Any) -> None:
        shown(self, step, metrics)
        if step.index == 1 and metrics.past.losses == []:
            watch.ask_stop("SIGTERM")

    monkeypatch.setattr(ProgressBar, "update", update)
    job = Job.from_config(load_config(write_config(tmp_path, **{
        **changes, "training__max_steps": 9, "checkpoint__every_steps": None, "checkpoint__at_end": True})))
    run = prepare_run(ResumePoint(None, None), job)
    assert train(job, run) == Stopped("SIGTERM", saved=True)
    count = len(losses(run))
    assert 2 <= count < 9
    assert metrics(run)[1] == []  # there may be no time to evaluate
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", f"step-{count}"]
    assert (f"stopped by SIGTERM after update {count}: saved; go on with: vpipe train --resume {run}"
            in capsys.readouterr().err)
    go_on(run)
    check_updates(run, 9)
    drained = (2 * count,) if changes else ()
    assert losses(run) == oracle(job, 9, drained).losses[:9]


def test_a_stop_that_is_asked_for_before_the_run_begins(tmp_path: Path) -> None:
    """It is obeyed, and forgotten after it; that nothing was saved is told."""
    job = Job.from_config(load_config(write_config(tmp_path, training__max_steps=9, checkpoint__at_end=False)))
    run = prepare_run(ResumePoint(None, None), job)
    watch.ask_stop("SIGTERM")
    assert train(job, run) == Stopped("SIGTERM", saved=False)
    assert 1 <= len(losses(run)) < 9
    assert watch.stop_asked is None


def test_files_of_earlier_attempts_are_kept_apart(tmp_path: Path) -> None:
    run = begin(tmp_path, **FLUSH, checkpoint__at_end=True)
    (run / "trace").mkdir()
    (run / "rank1.failure.json").write_text("{}")
    (run / "checkpoints" / "step-7.tmp").mkdir()
    time_s = [line["time_s"] for line in metrics(run)[0]][:3]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    go_on(run, "training.max_steps=4", at=3)
    earlier = run / "earlier" / "1"
    assert sorted(os.listdir(earlier)) == ["config.yaml", "metrics.jsonl", "origin.json", "rank1.failure.json",
                                           "rank_times.jsonl", "summary.csv", "trace"]
    assert "max_steps: 8" in (earlier / CONFIG).read_text()
    assert "max_steps: 4" in (run / CONFIG).read_text()
    assert len((earlier / "metrics.jsonl").read_text().splitlines()) == 14
    assert sorted(os.listdir(run / "checkpoints")) == ["earlier", "latest", "step-3", "step-4"]
    assert sorted(os.listdir(run / "checkpoints" / "earlier" / "1")) == ["step-6", "step-8"]
    assert (run / "checkpoints" / "latest").read_text() == "step-4\n"
    check_updates(run, 4)
    assert [line["time_s"] for line in metrics(run)[0]][:3] == time_s
    saves = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "checkpoint" in line]
    assert [(line["step"], line["checkpoint"]) for line in saves] == [(2, "step-3"), (3, "step-4")]
    assert {"pause_s", "save_s", "bytes", "drain_s"} <= saves[0].keys()
    assert not (run / "running").exists()


def test_every_sample_is_used_once(tmp_path: Path) -> None:
    """Batches of 8 samples, 8 of them an epoch; a run goes on in the middle of the second one."""
    job = Job.from_config(load_config(write_config(tmp_path)))
    all_of_them = [batch["input_ids"] for batch in islice(job.training_batches(("input_ids",)), 24)]
    for done in (0, 11, 16):
        rest = islice(replace(job, steps_done=done, samples_done=8 * done).training_batches(("input_ids",)), 24 - done)
        assert all(torch.equal(a["input_ids"], b) for a, b in zip(rest, all_of_them[done:], strict=True))


@pytest.mark.parametrize(("changes", "steps", "samples", "updates"), [
    ({}, 3, 24, 4), ({"max_steps": 2}, 3, 24, 3), ({"max_steps": None, "epochs": 2}, 3, 24, 16),
    ({"max_steps": None, "epochs": 1, "num_microbatches": 2}, 3, 24, 8)])
def test_limits_count_what_is_done(tmp_path: Path, changes: dict[str, Any], steps: int, samples: int,
                                   updates: int) -> None:
    job = Job.from_config(load_config(write_config(tmp_path, **{f"training__{key}": value for key,
                                                                value in changes.items()})))
    assert replace(job, steps_done=steps, samples_done=samples).updates == updates


def test_a_run_that_is_done_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path, checkpoint__at_end=True, training__max_steps=2)
    before = (run / "metrics.jsonl").read_text()
    go_on(run)
    assert (run / "metrics.jsonl").read_text() == before
    assert "nothing is left to do: 2 updates are done; raise training.max_steps" in capsys.readouterr().err
    go_on(run, "training.max_steps=3")
    check_updates(run, 3)
