"""What a run goes on from, and what may be another way then."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attempts import begin
from small_run import metrics, write_config

from vpipe import Cut
from vpipe.app.commands.train import _check_intact
from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.resume import ResumePoint, find_resume_point, nothing_left, prepare_run, resumed_config
from vpipe.app.train.run_folder import running, unlock_runs
from vpipe.checkpoint import checkpoint
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.plan.plan import Plan


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, saved."""
    return begin(tmp_path_factory.mktemp("one"), checkpoint__at_end=True, training__max_steps=1)


def test_runs_and_checkpoints_that_can_be_resumed(one: Path, tmp_path: Path) -> None:
    checkpoint = one / "checkpoints" / "step-1"
    for path in (one, one / "checkpoints", checkpoint):
        assert find_resume_point(path) == ResumePoint(one, checkpoint)
    copied = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    assert find_resume_point(copied) == ResumePoint(None, copied)
    with pytest.raises(UserError, match="is in no run's folder, so nothing says what to train"):
        resumed_config(find_resume_point(copied), None, [])
    start = find_resume_point(copied)
    job = Job.from_config(resumed_config(start, write_config(tmp_path, training__max_steps=2), []))
    run = prepare_run(start, job)  # a new one
    train(job, run, start)
    assert [line["step"] for line in metrics(run)[0]] == [1]
    with pytest.raises(UserError, match="does not exist"):
        find_resume_point(tmp_path / "none")


@pytest.mark.parametrize(("arrangement", "says"), [
    ({"imported": True, "from": "Hugging Face"}, "begins with the weights in 'FOLDER': {} tensors from Hugging Face"),
    ({}, "begins with the checkpoint 'FOLDER': {} tensors after step 1")])
def test_a_new_run_reports_the_weights_it_begins_with(one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                      arrangement: dict[str, Any], says: str) -> None:
    folder = shutil.copytree(one / "checkpoints" / "step-1", tmp_path / "start")
    manifest = replace(Manifest.load(folder), arrangement=arrangement)
    manifest.save(folder)
    start = find_resume_point(folder)
    prepare_run(start, Job.from_config(resumed_config(start, write_config(tmp_path), [])))
    unlock_runs()
    assert capsys.readouterr().err.splitlines() == [says.format(len(manifest.tensors)).replace("FOLDER", str(folder))]


def test_a_manifest_is_loaded_once_and_every_byte_is_hashed_once(one: Path, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Both before a rank starts; a rank loads the manifest once more, and hashes nothing."""
    run = shutil.copytree(one, tmp_path / "run")
    load, sha256_of = Manifest.load, checkpoint.sha256_of
    loaded: list[Path] = []
    hashed: list[str] = []

    def load_counted(folder: Path) -> Manifest:
        loaded.append(folder)
        return load(folder)

    def hash_counted(path: Path, *rest: Any) -> str:
        hashed.append(path.name)
        return sha256_of(path, *rest)

    monkeypatch.setattr(Manifest, "load", load_counted)
    monkeypatch.setattr(checkpoint, "sha256_of", hash_counted)
    start = find_resume_point(run / "checkpoints" / "step-1")
    job = Job.from_config(resumed_config(start, None, ["training.max_steps=2"]))
    _check_intact(start)
    assert nothing_left(start, job) is None
    prepare_run(start, job)
    assert loaded == [start.checkpoint]
    assert hashed == list(load(run / "checkpoints" / "step-1").files)
    train(job, run, start)
    unlock_runs()
    assert loaded == [start.checkpoint]
    assert len(hashed) == len(set(hashed))


def test_a_damaged_manifest_is_named_and_the_one_before_offered(tmp_path: Path) -> None:
    run = begin(tmp_path, checkpoint__every_steps=1, training__max_steps=2)
    path = run / "checkpoints" / "step-2" / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    for named in (run, path.parent):
        with pytest.raises(UserError, match="the manifest of the checkpoint is damaged") as caught:
            resumed_config(find_resume_point(named), None, [])
        assert caught.value.problems[0].hint.endswith(
            f"resume from step 1 with: vpipe train --resume {run}/checkpoints/step-1")


@pytest.mark.parametrize(("settings", "says"), [
    (["training.seed=1"], ["training.seed is 1, but the checkpoint was made with 0"]),
    (["dataset.batch_size=4", "training.optimizer=sgd"],
     ["dataset.batch_size is 4, but", "training.optimizer is 'sgd'"]),
    (["dataset.samples=72"], ["the data are not those of the checkpoint: training samples 64 -> 72, "]),
    (["model.hidden_size=32"], ["the checkpoint of step 1 is of another model: '"]),
    (["model.num_heads=4"], ["the checkpoint is of another model: num_attention_heads is 4, not 2"]),
])
def test_keys_that_a_resumed_run_may_not_change(one: Path, settings: list[str], says: list[str]) -> None:
    before = sorted(os.listdir(one))
    start = find_resume_point(one)
    with pytest.raises(UserError) as caught:
        prepare_run(start, Job.from_config(resumed_config(start, None, settings)))
    assert all(any(problem.what.startswith(text) for problem in caught.value.problems) for text in says)
    assert sorted(os.listdir(one)) == before


def test_a_run_that_is_still_going_is_left_alone(one: Path) -> None:
    job = Job.from_config(resumed_config(find_resume_point(one), None, []))
    with running(one):
        with pytest.raises(UserError, match=rf"is still going \(process {os.getpid()} on "):
            prepare_run(find_resume_point(one), job)
        with pytest.raises(UserError, match="is still going"):
            train(job, one)
    assert not (one / "running").exists()


def test_a_resumed_run_follows_its_plan_again(tmp_path: Path, one: Path) -> None:
    run = shutil.copytree(one, tmp_path / "run")
    Plan(Cut((1, 4))).save(run / "plan.json")
    start = find_resume_point(run)
    config = write_config(tmp_path, parallel__partition="auto", training__max_steps=2)

    def partition(*settings: str) -> Any:
        return resumed_config(start, config, settings).parallel.partition

    assert partition() == (1, 4)
    assert partition("parallel.partition=auto") == "auto"
    assert partition("parallel.model_parallel_size=3") == "auto"
    assert partition("parallel.partition=[3, 2]") == (3, 2)
    job = Job.from_config(resumed_config(start, config, ["parallel.partition=[3, 2]"]))
    prepare_run(start, job)
    assert not (run / "plan.json").exists()
    assert (run / "earlier" / "1" / "plan.json").exists()


@pytest.mark.parametrize(("settings", "expected"), [
    (["parallel.partition=[1, 2, 2]"], {"partition": (1, 2, 2), "model_parallel_size": 3, "stage_to_rank_map": None,
                                        "recompute": 0.0, "compress": "none"}),
    (["parallel.model_parallel_size=3"], {"partition": "auto", "stage_to_rank_map": None}),
    (["parallel.partition=[1, 4]"], {"partition": (1, 4), "stage_to_rank_map": {"0": (0, 1), "1": (2,)},
                                     "recompute": 0.0, "compress": ("bf16",)}),
    (["parallel.schedule=1f1b"], {"update_every": None, "partition": (3, 2)}),
    (["parallel.schedule=2bw"], {"update_every": 2}),  # an update takes the whole batch still
    (["parallel.schedule=2bw", "parallel.update_every=1"], {"update_every": 1}),
    (["parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2]}"], {"partition": "auto", "model_parallel_size": 3}),
    (["training.max_steps=9"], {"update_every": 2, "recompute": ((0,), ()), "compress": ("bf16",)}),
])
def test_setting_a_key_resets_those_that_follow_from_it(tmp_path: Path, settings: list[str],
                                                        expected: dict[str, Any]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_config(write_config(
        tmp_path, parallel__schedule="pipedream", parallel__update_every=2, parallel__recompute=[[0], []],
        parallel__stage_to_rank_map={"0": [0, 1], "1": [2]}, parallel__compress=["bf16"])).resolved_yaml())
    parallel = load_config(path, settings, resolved=True).parallel
    assert {key: getattr(parallel, key) for key in expected} == expected
