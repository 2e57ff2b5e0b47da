"""A run that was ended goes on as if it had not been: the same losses, weights and learning rates, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import check_updates, losses, metrics, oracle, write_config
from torch import Tensor

from vpipe.checkpoint import storage
from vpipe.checkpoint.manifest import Manifest
from vpipe.checkpoint.restore import read
from vpipe.errors import LastingError, RunError, UserError
from vpipe.launch.folder import CONFIG, running
from vpipe.pipeline import Pipeline
from vpipe.plan.plan import Plan
from vpipe.runtime.engine import Step
from vpipe.train.config import load_config
from vpipe.train.job import Job
from vpipe.train.loop import _Run, train
from vpipe.train.progress import Progress
from vpipe.train.resume import Start, resumed_config, start_of, take_up
from vpipe.watch.current import ask_stop

FLUSH = {"checkpoint__every_steps": 3, "training__max_steps": 8}
STREAM = {"checkpoint__every_steps": 3, "training__max_steps": 8, "parallel__schedule": "pipedream",
          "parallel__update_every": 2}


class Killed(BaseException):
    """As a process is: nobody is told, nothing is tidied."""


def begin(folder: Path, **changes: Any) -> Path:
    """A run from its first step; its folder."""
    folder.mkdir(exist_ok=True)
    job = Job.of(load_config(write_config(folder, **changes)))
    run = take_up(Start(None, None), job)
    train(job, run)
    return run


def go_on(run: Path, *settings: str, at: int | None = None, config: Path | None = None) -> Job:
    """``vpipe train --resume``, from the newest checkpoint or one."""
    start = start_of(run if at is None else run / "checkpoints" / f"step-{at}")
    job = Job.of(resumed_config(start, config, settings, None))
    assert take_up(start, job) == run
    train(job, run, start.checkpoint)
    return job


def cut_short(folder: Path, monkeypatch: pytest.MonkeyPatch, after: int, **changes: Any) -> Path:
    """A run that is killed when so many steps are done and the saves before them are complete."""
    recorded = _Run._record

    def record(self: _Run, *steps: Step) -> None:
        recorded(self, *steps)
        if self._metrics.steps >= after:
            self._saving.finish()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_record", record)
        with pytest.raises(Killed):
            begin(folder, **changes)
    [run] = (folder / "runs").iterdir()
    return run


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    """All that a checkpoint of a run holds."""
    folder = run / "checkpoints" / f"step-{step}"
    manifest = Manifest.load(folder)
    return read(folder, manifest, manifest.tensors)


def check_equal(one: Path, other: Path, step: int, only: str = "") -> None:
    """Two runs have the same lines, but for their times, and the same state after a step."""
    for kind in (0, 1):
        said = [[{key: value for key, value in line.items() if not key.endswith("_s")} for line in metrics(run)[kind]]
                for run in (one, other)]
        assert said[0] == said[1]
    mine, theirs = ({name: tensor for name, tensor in tensors(run, step).items() if name.startswith(only)}
                    for run in (one, other))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("changes", [
    {"training__grad_clip": 0.5, "training__lr_policy": "cosine", "training__warmup_steps": 2,
     "training__evaluate_every": 2, "parallel__recompute": 1.0},
    {**STREAM, "training__optimizer": "lamb", "training__evaluate_every": 4, "parallel__model_parallel_size": 3},
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


@pytest.mark.parametrize("changes", [{}, STREAM], ids=["flush", "stream"])
def test_a_run_that_a_signal_stops_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str],
                                                     changes: dict[str, Any]) -> None:
    shown = Progress.update

    def update(self: Progress, step: Step, metrics: Any) -> None:
        shown(self, step, metrics)
        if step.index == 1 and metrics.past.losses == []:
            ask_stop("SIGTERM")

    monkeypatch.setattr(Progress, "update", update)
    job = Job.of(load_config(write_config(tmp_path, **{
        **changes, "training__max_steps": 9, "checkpoint__every_steps": None, "checkpoint__at_end": True})))
    run = take_up(Start(None, None), job)
    assert train(job, run) == "SIGTERM"
    count = len(losses(run))
    assert 2 <= count < 9
    assert metrics(run)[1] == []  # there may be no time to evaluate
    assert os.listdir(run / "checkpoints/") == ["latest", f"step-{count}"] or count
    assert (f"stopped by SIGTERM after update {count}: saved; go on with: vpipe train --resume {run}"
            in capsys.readouterr().err)
    go_on(run)
    check_updates(run, 9)
    drained = (2 * count,) if changes else ()
    assert losses(run) == oracle(job, 9, drained).losses[:9]


def test_what_earlier_attempts_left_is_kept_apart(tmp_path: Path) -> None:
    run = begin(tmp_path, **FLUSH, checkpoint__at_end=True)
    (run / "trace").mkdir()
    (run / "rank1.failure.json").write_text("{}")
    (run / "checkpoints" / "step-7.tmp").mkdir()
    time_s = [line["time_s"] for line in metrics(run)[0]][:3]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    go_on(run, "training.max_steps=4", at=3)
    earlier = run / "earlier" / "1"
    assert sorted(os.listdir(earlier)) == ["config.yaml", "metrics.jsonl", "rank1.failure.json", "trace"]
    assert "max_steps: 8" in (earlier / CONFIG).read_text()
    assert "max_steps: 4" in (run / CONFIG).read_text()
    assert len((earlier / "metrics.jsonl").read_text().splitlines()) == 13
    assert sorted(os.listdir(run / "checkpoints")) == ["earlier", "latest", "step-3", "step-4"]
    assert sorted(os.listdir(run / "checkpoints" / "earlier" / "1")) == ["step-6", "step-8"]
    assert (run / "checkpoints" / "latest").read_text() == "step-4\n"
    check_updates(run, 4)
    assert [line["time_s"] for line in metrics(run)[0]][:3] == time_s
    saves = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "checkpoint" in line]
    assert [(line["step"], line["checkpoint"]) for line in saves] == [(2, "step-3"), (3, "step-4")]
    assert {"pause_s", "save_s", "bytes", "drain_s"} <= saves[0].keys()
    assert not (run / "running").exists()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run = begin(tmp_path, checkpoint__every_steps=1, checkpoint__keep=2)
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-3", "step-4"]


def test_every_sample_is_used_once(tmp_path: Path) -> None:
    """Batches of 8 samples, 8 of them an epoch; a run goes on in the middle of the second one."""
    job = Job.of(load_config(write_config(tmp_path)))
    all_of_them = [batch["input_ids"] for batch in islice(job.training_batches(("input_ids",)), 24)]
    for done in (0, 11, 16):
        rest = islice(job.resumed(done, 8 * done).training_batches(("input_ids",)), 24 - done)
        assert all(torch.equal(a["input_ids"], b) for a, b in zip(rest, all_of_them[done:], strict=True))


@pytest.mark.parametrize(("changes", "steps", "samples", "updates"), [
    ({}, 3, 24, 4), ({"max_steps": 2}, 3, 24, 3), ({"max_steps": None, "epochs": 2}, 3, 24, 16),
    ({"max_steps": None, "epochs": 1, "num_microbatches": 2}, 3, 24, 8)])
def test_limits_count_what_is_done(tmp_path: Path, changes: dict[str, Any], steps: int, samples: int,
                                   updates: int) -> None:
    job = Job.of(load_config(write_config(tmp_path, **{f"training__{key}": value for key, value in changes.items()})))
    assert job.resumed(steps, samples).updates == updates


def test_a_run_that_is_done_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path, checkpoint__at_end=True, training__max_steps=2)
    before = (run / "metrics.jsonl").read_text()
    go_on(run)
    assert (run / "metrics.jsonl").read_text() == before
    assert "nothing is left to do: 2 updates are done; a larger training.max_steps" in capsys.readouterr().err
    go_on(run, "training.max_steps=3")
    check_updates(run, 3)


@pytest.mark.parametrize(("settings", "says"), [
    (["training.seed=1"], ["training.seed is 1, but the checkpoint was made with 0"]),
    (["dataset.batch_size=4", "training.optimizer=sgd"],
     ["dataset.batch_size is 4, but", "training.optimizer is 'sgd'"]),
    (["dataset.samples=72"], ["the data are not those of the checkpoint: their fingerprint is "]),
    (["model.hidden_size=32"], ["the checkpoint of step 1 is of another model: '"]),
    (["model.num_heads=4"], ["the checkpoint is of another model: num_attention_heads is 4, not 2"]),
])
def test_what_a_run_that_goes_on_may_not_change(one: Path, settings: list[str], says: list[str]) -> None:
    before = sorted(os.listdir(one))
    start = start_of(one)
    with pytest.raises(UserError) as caught:
        take_up(start, Job.of(resumed_config(start, None, settings, None)))
    assert all(any(problem.what.startswith(text) for problem in caught.value.problems) for text in says)
    assert sorted(os.listdir(one)) == before


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, saved."""
    return begin(tmp_path_factory.mktemp("one"), checkpoint__at_end=True, training__max_steps=1)


def test_what_can_be_gone_on_with(one: Path, tmp_path: Path) -> None:
    checkpoint = one / "checkpoints" / "step-1"
    for path in (one, one / "checkpoints", checkpoint):
        assert start_of(path) == Start(one, checkpoint)
    copied = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    assert start_of(copied) == Start(None, copied)
    with pytest.raises(UserError, match="is in no run's folder, so nothing says what to train"):
        resumed_config(start_of(copied), None, [], None)
    job = Job.of(resumed_config(start_of(copied), write_config(tmp_path, training__max_steps=2), [], None))
    run = take_up(start_of(copied), job)  # a new one
    train(job, run, copied)
    assert [line["step"] for line in metrics(run)[0]] == [1]
    with pytest.raises(UserError, match="does not exist"):
        start_of(tmp_path / "none")


def test_a_damaged_manifest_is_named_and_the_one_before_offered(tmp_path: Path) -> None:
    run = begin(tmp_path, checkpoint__every_steps=1, training__max_steps=2)
    path = run / "checkpoints" / "step-2" / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    for named in (run, path.parent):
        with pytest.raises(UserError, match="the manifest of the checkpoint is damaged") as caught:
            resumed_config(start_of(named), None, [], None)
        assert caught.value.problems[0].hint.endswith(
            f"resume from step 1 with: vpipe train --resume {run}/checkpoints/step-1")


def test_what_was_planned_is_followed_again(tmp_path: Path, one: Path) -> None:
    run = shutil.copytree(one, tmp_path / "run")
    Plan((1, 4)).save(run / "plan.json")
    start = start_of(run)
    config = write_config(tmp_path, parallel__partition="auto", training__max_steps=2)

    def partition(*settings: str) -> Any:
        return resumed_config(start, config, settings, None).parallel.partition

    assert partition() == (1, 4)
    assert partition("parallel.partition=auto") == "auto"
    assert partition("parallel.model_parallel_size=3") == "auto"
    assert partition("parallel.partition=[3, 2]") == (3, 2)
    job = Job.of(resumed_config(start, config, ["parallel.partition=[3, 2]"], None))
    take_up(start, job)
    assert not (run / "plan.json").exists()
    assert (run / "earlier" / "1" / "plan.json").exists()


def test_checkpoints_in_a_directory_of_their_own(tmp_path: Path) -> None:
    run = begin(tmp_path, checkpoint__at_end=True, checkpoint__directory=str(tmp_path / "c"), training__max_steps=1)
    checkpoint = tmp_path / "c" / run.name / "step-1"
    assert start_of(run) == start_of(checkpoint) == start_of(checkpoint.parent) == Start(run, checkpoint)
    assert not (run / "checkpoints").exists()


def test_a_run_that_is_still_going_is_left_alone(one: Path) -> None:
    job = Job.of(resumed_config(start_of(one), None, [], None))
    with running(one):
        with pytest.raises(UserError, match=rf"is still going \(process {os.getpid()} on "):
            take_up(start_of(one), job)
        with pytest.raises(UserError, match="is still going"):
            train(job, one)
    assert not (one / "running").exists()


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_loss_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_nan: str,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    batches = Job.training_batches

    def spoiled(self: Job, fields: tuple[str, ...]) -> Any:
        for number, batch in enumerate(batches(self, fields)):
            yield batch
            if number == 1:  # after the second step, the next batch is read
                for parameter in weights:
                    parameter.fill_(float("nan"))

    weights: list[Tensor] = []
    built = Pipeline.__init__

    def build(self: Pipeline, *arguments: Any, **named: Any) -> None:
        built(self, *arguments, **named)
        weights.extend(p.data for stage in self.engine.local_stages for p in stage.weights.masters.values())

    monkeypatch.setattr(Pipeline, "__init__", build)
    monkeypatch.setattr(Job, "training_batches", spoiled)
    folder = tmp_path
    if on_nan == "skip":
        begin(folder, training__on_nan="skip", training__max_steps=3, parallel__partition=[5],
              parallel__model_parallel_size=1)
        assert "update 3 was skipped: loss is nan" in capsys.readouterr().err
    else:
        with pytest.raises(LastingError, match="loss is nan at step 2") as caught:
            begin(folder, checkpoint__every_steps=1, parallel__partition=[5], parallel__model_parallel_size=1)
        assert "the checkpoints before it are in" in caught.value.hint
    [run] = (folder / "runs").iterdir()
    lines = metrics(run)[0]
    assert [line["loss"] is None for line in lines] == [False, False, True]
    assert lines[2].get("skipped") is (True if on_nan == "skip" else None)
    if on_nan == "stop":
        assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-1", "step-2"]


@pytest.mark.parametrize("last", [False, True])
def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                             last: bool) -> None:
    written = storage.write

    def write(partial: Path, *rest: Any) -> Any:
        if partial.name == ("step-4.tmp" if last else "step-2.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(partial, *rest)

    monkeypatch.setattr(storage, "write", write)
    changes = {"checkpoint__every_steps": 1, "checkpoint__keep": None}
    if last:
        with pytest.raises(RunError, match="the last checkpoint, of step 4, could not be saved: No space left"):
            begin(tmp_path, **changes)
    else:
        begin(tmp_path, **changes)
    [run] = (tmp_path / "runs").iterdir()
    check_updates(run, 4)
    given_up = 4 if last else 2
    assert sorted(os.listdir(run / "checkpoints")) == [
        "latest", *(f"step-{step}" for step in range(1, 5) if step != given_up)]
    out, err = capsys.readouterr()
    assert f"warning: could not save step {given_up}: No space left on device" in err
    assert "3 checkpoints of " in out
    [line] = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"error"' in line]
    assert json.loads(line)["checkpoint"] == f"step-{given_up}"


def test_a_folder_that_not_all_hosts_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: Any) -> None:
        raise UserError("rank 1 (b) does not see it", hint="set checkpoint.directory")

    monkeypatch.setattr("vpipe.train.saving.shared_folder_check", refused)
    with pytest.raises(UserError, match="rank 1"):
        begin(tmp_path / "a", checkpoint__at_end=True)
    (tmp_path / "b").mkdir()
    config = load_config(write_config(tmp_path / "b", training__max_steps=1), ["checkpoint=null"])
    train(Job.of(config), tmp_path / "b")
    assert "no checkpoints are made: rank 1 (b) does not see it (set checkpoint.directory)" in capsys.readouterr().err


@pytest.mark.parametrize(("settings", "expected"), [
    (["parallel.partition=[1, 2, 2]"], {"partition": (1, 2, 2), "model_parallel_size": 3, "stage_to_rank_map": None,
                                        "recompute": 0.0, "compress": "none"}),
    (["parallel.model_parallel_size=3"], {"partition": "auto", "stage_to_rank_map": None}),
    (["parallel.partition=[1, 4]"], {"partition": (1, 4), "stage_to_rank_map": {"0": (0, 1), "1": (2,)},
                                     "recompute": 0.0, "compress": ("bf16",)}),
    (["parallel.schedule=1f1b"], {"update_every": None, "partition": (3, 2)}),
    (["parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2]}"], {"partition": "auto", "model_parallel_size": 3}),
    (["training.max_steps=9"], {"update_every": 2, "recompute": ((0,), ()), "compress": ("bf16",)}),
])
def test_what_follows_from_a_key_that_is_set_goes_with_it(tmp_path: Path, settings: list[str],
                                                          expected: dict[str, Any]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_config(write_config(
        tmp_path, parallel__schedule="pipedream", parallel__update_every=2, parallel__recompute=[[0], []],
        parallel__stage_to_rank_map={"0": [0, 1], "1": [2]}, parallel__compress=["bf16"])).resolved_yaml())
    parallel = load_config(path, settings, resolved=True).parallel
    assert {key: getattr(parallel, key) for key in expected} == expected
