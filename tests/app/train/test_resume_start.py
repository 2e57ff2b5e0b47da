"""A run's folder is made ready to go on: by one process only, killed at any moment, and what is said of it."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attempts import begin, go_on
from small_run import metrics, write_config

from vpipe.app.commands.train import _resume_point
from vpipe.app.config.config import load_config
from vpipe.app.errors import StartError
from vpipe.app.launch.launcher import run as launch
from vpipe.app.launch.restart import Starter
from vpipe.app.train import run_folder as folders
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.resume import (
    ResumePoint,
    changed_keys,
    find_resume_point,
    nothing_left,
    prepare_run,
    resumed_config,
)
from vpipe.app.train.run_folder import LAUNCHED, make_run_folder, unlock_runs
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError

ONE = {"parallel__model_parallel_size": 1, "model__num_layers": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, a checkpoint after each two."""
    return begin(tmp_path_factory.mktemp("whole"), checkpoint__every_steps=2, checkpoint__keep=None,
                 checkpoint__at_end=True, training__max_steps=6, training__lr_policy="polynomial", **ONE)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """The same, to be touched."""
    return shutil.copytree(whole, tmp_path / "run")


def ready(start: ResumePoint, *settings: str) -> Path:
    """What the launcher does before it starts ranks."""
    return prepare_run(start, Job.from_config(resumed_config(start, None, settings)))


def test_a_checkpoint_that_is_damaged_where_a_rank_reads_it_is_a_users_mistake(run: Path) -> None:
    start = find_resume_point(run)
    assert start.checkpoint is not None
    [shard] = start.checkpoint.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])  # after its files were hashed, or on another host
    with pytest.raises(StartError, match="cannot read the checkpoint"):
        train(Job.from_config(resumed_config(start, None, [])), ready(start), start)


class Killed(BaseException):
    """As a process is: nothing is tidied."""


@pytest.mark.parametrize("renames", [1, 2, 3, 4, 5])
def test_killed_as_it_takes_a_run_up(run: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    """Whatever it goes on from then, metrics.jsonl has the lines of the steps before."""
    done = [0]

    def one_less(name: str) -> Any:
        original = getattr(Path, name)

        def moved(self: Path, target: Path) -> Path:
            if done[0] == renames:
                raise Killed
            done[0] += 1
            found: Path = original(self, target)
            return found

        return moved

    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(Path, name, one_less(name))
        with pytest.raises(Killed):
            ready(find_resume_point(run / "checkpoints" / "step-2"))
    start = find_resume_point(run)
    assert start.checkpoint is not None
    ready(start)
    steps = Manifest.load(start.checkpoint).step
    assert [line["step"] for line in metrics(run)[0]] == list(range(steps))


def test_of_two_that_would_go_on_only_one_touches_the_run(run: Path) -> None:
    start = find_resume_point(run / "checkpoints" / "step-2")
    before = sorted(path.name for path in run.iterdir())
    with (run / LAUNCHED).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on there\n")
        file.flush()
        with pytest.raises(UserError, match=r"is still going \(process 7 on there\)"):
            ready(start)
        (run / LAUNCHED).unlink()
    assert sorted(path.name for path in run.iterdir()) == before
    ready(start)
    with (run / LAUNCHED).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ready(find_resume_point(run))  # the launcher's next attempt
    unlock_runs()
    assert not (run / LAUNCHED).exists()


def test_a_resume_reports_repeated_updates_and_changed_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready(find_resume_point(run / "checkpoints" / "step-4"), "training.max_steps=8", "training.num_microbatches=2")
    assert capsys.readouterr().err.splitlines() == [
        "updates 5 to 6 are repeated; their lines and step-6 are in earlier/1",
        "changed since step 4: training.max_steps 6 -> 8 (the learning rate follows the new end); "
        "training.num_microbatches 4 -> 2 (other losses from here on)"]
    ready(find_resume_point(run), "training.lr_policy=constant", "training.max_steps=9", "parallel.schedule=pipedream",
          "parallel.partition=[1, 2]", "checkpoint.every_steps=3")
    assert capsys.readouterr().err.splitlines() == [
        "changed since step 4: training.max_steps 6 -> 9; training.num_microbatches 4 -> 2 (other losses from here on)"
        "; training.lr_policy 'polynomial' -> 'constant'; parallel.model_parallel_size 1 -> 2; parallel.schedule "
        "'1f1b' -> 'pipedream' (without a flush, so another run from here on); parallel.partition [3] -> [1, 2]; "
        "parallel.update_every nothing -> 1; checkpoint.every_steps 2 -> 3"]
    manifest = Manifest.load(run / "checkpoints" / "step-4")
    assert changed_keys(replace(manifest, config=(run / "config.yaml").read_text(), arrangement={"drained": True}),
                   load_config(run / "config.yaml", ["checkpoint.every_steps=4"])) == [
        "checkpoint.every_steps 3 -> 4 (without a flush, so another run from here on)"]


def test_a_finished_run_is_left_as_it_is(run: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("vpipe.app.launch.local.run_ranks", lambda *_: pytest.fail("no rank is to be started"))
    start = find_resume_point(run)
    before = sorted(run.rglob("*"))
    for settings in ([], ["training.max_steps=2"]):  # whatever the limit is now
        launch(resumed_config(start, None, settings), start, None)
        unlock_runs()
        assert capsys.readouterr().out.splitlines() == [
            "nothing is left to do: 6 updates are done; to continue, give a larger limit: vpipe train --resume "
            f"{run} --set training.max_steps=12"]
    assert sorted(run.rglob("*")) == before
    with pytest.raises(UserError, match="the data are not those of the checkpoint"):
        launch(resumed_config(start, None, ["dataset.samples=72"]), start, None)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("".join(
        line for line in text.splitlines(keepends=True) if "evaluation_loss" not in line))
    assert nothing_left(start, Job.from_config(resumed_config(start, None, []))) is None


def test_checkpoints_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    run = begin(tmp_path, checkpoint__directory="cks", checkpoint__at_end=True, training__max_steps=1, **ONE)
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "there" / "cks" / run.name / "step-1"
    for path in (run, checkpoint, checkpoint.parent):
        assert find_resume_point(path) == ResumePoint(run, checkpoint)
    assert not (run / "checkpoints").exists()


def test_another_directory_for_the_checkpoints(run: Path, tmp_path: Path) -> None:
    """Until one is in the new one, those in the old one count, but none of later steps."""
    ready(find_resume_point(run / "checkpoints" / "step-4"), f"checkpoint.directory={tmp_path / 'new'}",
          "training.max_steps=8")
    assert find_resume_point(run) == ResumePoint(run, run / "checkpoints" / "step-4")
    go_on(run)
    assert find_resume_point(run) == ResumePoint(run, tmp_path / "new" / "run" / "step-8")


def test_runs_of_one_second_share_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen:
        @staticmethod
        def now() -> Any:
            return argparse.Namespace(strftime=lambda form: "now")

    monkeypatch.setattr(folders, "datetime", Frozen)
    named = [make_run_folder(tmp_path / log, "", tmp_path / "shared").name for log in ("one", "two", "one")]
    assert named == ["now", "now.1", "now.2"]
    assert sorted(os.listdir(tmp_path / "two")) == ["now.1"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the folder of the run's checkpoints"):
        make_run_folder(tmp_path / "three", "", tmp_path / "file")
    assert os.listdir(tmp_path / "three") == []


def test_checkpoints_of_another_run_are_left_alone(whole: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, **ONE, checkpoint__at_end=True, checkpoint__directory=str(tmp_path / "shared"))
    other = shutil.copytree(whole, tmp_path / "other")
    shutil.copytree(whole / "checkpoints", tmp_path / "shared" / "other")
    (other / "config.yaml").write_text(load_config(config, ["training.max_steps=8"]).resolved_yaml())
    with pytest.raises(UserError, match=f"are those of another run, '{whole}'"):
        ready(find_resume_point(other))


def test_a_checkpoint_that_a_later_attempt_finds_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives the same command every time; meanwhile the run has removed the checkpoint that it names."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1",
                        "TORCHELASTIC_RUN_ID": "x", "VPIPE_AGENT": "process 7"}.items():
        monkeypatch.setenv(name, value)
    shutil.rmtree(run / "checkpoints" / "step-2")
    told = argparse.Namespace(restarts=None, resume=run / "checkpoints" / "step-2", config=None, settings=[])
    with pytest.raises(UserError, match="it does not exist"):
        _resume_point(told)
    Starter("torchrun", ("process 7",)).write(run)
    assert _resume_point(told) == ResumePoint(run, run / "checkpoints" / "step-6")
    told.resume = run / "checkpoint" / "step-2"
    with pytest.raises(UserError, match="it does not exist"):
        _resume_point(told)


def test_a_checkpoint_of_another_family_is_told_by_name(run: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model__name="gpt", model__preset=None, model__num_layers=1, model__num_heads=2,
                          parallel__model_parallel_size=1)
    start = find_resume_point(run / "checkpoints" / "step-6")
    with pytest.raises(UserError) as caught:
        prepare_run(start, Job.from_config(resumed_config(start, config, [])))
    assert [(problem.what, problem.hint) for problem in caught.value.problems] == [
        ("the checkpoint is of the model 'bert', but model.name is 'gpt'",
         "set model.name to bert, with its sizes: vpipe checkpoint show prints them")]
