"""When a run is started again, and from which checkpoint."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import write_config

from vpipe.app import run_log
from vpipe.app.cli import main
from vpipe.app.config.config import Config, load_config
from vpipe.app.launch.failure_report import find_failure
from vpipe.app.launch.rank_env import ranks_of
from vpipe.app.launch.restart import FILE, Attempt, Failure, Starter, fitted, give_up_reason, restart_point
from vpipe.app.run_log import RunLog
from vpipe.app.train.job import Job
from vpipe.app.train.run_folder import failure_path, unlock_runs
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import MANIFEST, Manifest
from vpipe.distributed.environment import RankEnvironment, starter_id
from vpipe.errors import UserError

KILLED = Failure("rank 2 was killed; rank 1 was waiting for F7", 41, "step-40")


def test_as_often_as_was_allowed() -> None:
    failures = [replace(KILLED, step=step) for step in (41, 52, 47)]
    assert give_up_reason(failures, 3) is None
    assert give_up_reason(failures[:1], 0) == "it was attempt 1 of 1"
    assert give_up_reason(failures, 2) == "it was attempt 3 of 3"
    assert give_up_reason(failures * 9, None) is None


@pytest.mark.parametrize(("other", "repeats"), [
    ({}, True), ({"what": "rank 2 was killed; rank 0 was evaluating"}, True), ({"what": "rank 3 was killed"}, False),
    ({"step": 42}, False), ({"checkpoint": "step-20"}, False)])
def test_the_same_failure_from_the_same_state_at_the_same_step_would_come_again(other: dict[str, str],
                                                                                 repeats: bool) -> None:
    why = give_up_reason([replace(KILLED, **other), KILLED], 9)  # type: ignore[arg-type]
    assert why == ("the same failure came twice in a row after step 41, so it would come again" if repeats else None)


def test_a_failure_before_the_first_step_repeats_too() -> None:
    assert give_up_reason([replace(KILLED, step=None)] * 2, 9) == \
        "the same failure came twice in a row before the first step, so it would come again"


def test_the_last_step_that_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunLog(tmp_path).last_step() is None
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(300)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 299, "evaluation_loss": 2.0}', '{"step": 30']))
    assert RunLog(tmp_path).last_step() == 299
    monkeypatch.setattr(run_log, "TAIL_BYTES", 200)
    assert RunLog(tmp_path).last_step() == 299


def checkpoint(root: Path, step: int) -> Path:
    """A complete one with nothing in it."""
    folder = root / f"step-{step}"
    folder.mkdir(parents=True)
    Manifest(step=step, samples=8 * step, seed=0, tensors={}, files={}).save(folder)
    return folder


def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path).rename(tmp_path / "config.yaml")

    def next_start(attempt: str) -> tuple[Path | None, list[str]]:
        point = restart_point(tmp_path, None, attempt, "rank 2 was killed")
        assert point.folder == tmp_path
        return point.checkpoint, capsys.readouterr().err.splitlines()

    assert next_start("attempt 2 of 4") == (None, [
        "attempt 2 of 4: rank 2 was killed; starting from the beginning, since there is no checkpoint yet"])
    older, newer = (checkpoint(tmp_path / "checkpoints", step) for step in (20, 40))
    assert next_start("attempt 2") == (newer, ["attempt 2: rank 2 was killed; going on from step 40"])
    text = (newer / MANIFEST).read_text()
    (newer / MANIFEST).write_text(text[:len(text) // 2])
    found, (skipped, said) = next_start("attempt 3")
    assert found == older
    assert skipped.startswith("step-40 is skipped: ")
    assert said == "attempt 3: rank 2 was killed; going on from step 20"


def test_a_run_is_found_by_what_started_it(tmp_path: Path) -> None:
    for name, agents, starter in (("1", ["a", "b"], "torchrun"), ("2", ["b"], "torchrun"), ("3", ["a"], "srun")):
        (tmp_path / name).mkdir()
        Starter(starter, tuple(agents), (KILLED,), "step-40").write(tmp_path / name)
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / FILE).write_text('{"starter": "torchrun"')

    def begun(*agents: str) -> Path | None:
        return Starter("torchrun", agents).find_run(tmp_path, None, again=False)

    assert begun("b", "c") == tmp_path / "2"
    assert begun("a") == tmp_path / "1"
    assert begun("c") is None
    assert Starter.read(tmp_path / "1") == Starter("torchrun", ("a", "b"), (KILLED,), "step-40")


def test_trainings_of_one_script_are_told_apart(tmp_path: Path) -> None:
    """Under torchrun all have the same parent; a job's step is one training, whatever becomes of its config."""
    for number, name in enumerate(("torchrun", "srun")):
        folder = tmp_path / str(number)
        folder.mkdir()
        starter = Starter(name, ("a",), config="one")
        starter.write(folder)
        changed = replace(starter, config="two")
        assert starter.find_run(tmp_path, None, again=False) == folder
        assert changed.find_run(tmp_path, None, again=True) == (None if name == "torchrun" else folder)
        assert changed.find_run(tmp_path, folder, again=True) == folder  # by --resume
        replace(starter, ended=True).write(folder)
        assert starter.find_run(tmp_path, None, again=False) is None
        assert starter.find_run(tmp_path, None, again=True) == folder  # another rank failed at the very end


def test_a_config_that_was_edited_while_the_job_waited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds, cut as before; one that is as it was goes on with what was planned for it."""
    member = RankEnvironment("srun", 0, 2, 0, "n1", "127.0.0.1", 1, agent="job 7.0")

    def concluded(restarts: int, *settings: str) -> tuple[Path, Config]:
        told = load_config(write_config(tmp_path), settings)
        found = Attempt.find(replace(member, restarts=restarts), Job.from_config(told), None, None, ["job 7.0"],
                             told.resolved_yaml())
        (tmp_path / "said.yaml").write_text(found.job.config.resolved_yaml())
        return found.begin(), load_config(tmp_path / "said.yaml")

    folder, first = concluded(0)
    (folder / "config.yaml").write_text(first.with_parallel(partition=(1, 4)).resolved_yaml())  # as it was planned
    assert concluded(1) == (folder, first.with_parallel(partition=(1, 4)))
    assert "the config has changed" not in capsys.readouterr().err
    _, edited = concluded(2, "training.learning_rate=0.5")
    assert (edited.training.learning_rate, edited.parallel.partition) == (0.5, (1, 4))
    assert "the config has changed since the attempt before; this one follows it as it is now" in \
        capsys.readouterr().err
    assert concluded(3, "training.learning_rate=0.5", "parallel.partition=[2, 3]")[1].parallel.partition == (2, 3)
    unlock_runs()


@pytest.mark.parametrize("saved", [True, False])
def test_a_failed_run_is_offered_for_resume_only_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   saved: bool) -> None:
    member = RankEnvironment("srun", 0, 2, 0, "n1", "127.0.0.1", 1, agent="job 7.0")
    job = Job.from_config(load_config(write_config(tmp_path)))
    run = Attempt.find(member, job, None, None, ["job 7.0"]).begin()
    report = {"rank": 0, "blames": False, "reporter": True, "fault": None, "time": 1.0, "lasting": True,
              "starting": False, "frames": "", "problems": [["x is 3", "use 4", None]]}
    failure_path(run, 0).write_text(json.dumps(report))
    monkeypatch.setattr(Checkpoints, "newest", lambda self: self.root / "step-4" if saved else None)
    with pytest.raises(UserError, match="x is 3; not started again: it would come again") as caught:
        Attempt.find(replace(member, restarts=1), job, None, None, ["job 7.0"])
    assert caught.value.problems[0].hint == (f"mend it, then go on with: vpipe train --resume {run}" if saved else
                                             f"mend it, then begin anew: vpipe train {run}/config.yaml")
    unlock_runs()


def test_the_starter_of_a_rank_is_identified() -> None:
    parent = starter_id({}, None)
    assert parent.startswith(f"process {os.getppid()} on {socket.gethostname()} since ")
    assert starter_id({"SLURM_CLUSTER_NAME": "big"}, "4711.0") == "big job 4711.0"
    assert starter_id({"VPIPE_AGENT": parent}, "4711.0") == parent  # in a container


def test_the_failure_of_the_attempt_before(tmp_path: Path) -> None:
    assert find_failure(tmp_path, str, {}) is None
    for rank, (blames, time) in enumerate([(True, 1.0), (False, 3.0), (False, 2.0)]):
        failure_path(tmp_path, rank).write_text(json.dumps({
            "rank": rank, "blames": blames, "time": time, "fault": None, "reporter": True,
            "starting": False, "lasting": False, "frames": "", "problems": [[f"{rank} broke", "mend it", None]]}))
    assert str(find_failure(tmp_path, str, {})) == "error: 2 broke\nhint: mend it"


def config(**parallel: object) -> Config:
    return Config.model_validate({
        "model": {"name": "bert", "preset": "tiny"}, "dataset": {"name": "synthetic", "batch_size": 16},
        "training": {"learning_rate": 0.1, "num_microbatches": 8}, "parallel": parallel})


@pytest.mark.parametrize(("parallel", "ranks", "stages", "replicas"), [
    ({"partition": [2, 1, 1, 1]}, 3, 3, 1),
    ({"partition": [2, 1, 1, 1]}, 8, 4, 2),
    ({"model_parallel_size": 2, "data_parallel_size": 2}, 2, 2, 1),
    ({"model_parallel_size": 3, "data_parallel_size": 2}, 4, 2, 2),
    ({"model_parallel_size": 3, "data_parallel_size": 2}, 5, 5, 1),
    ({"model_parallel_size": 8, "schedule": "interleaved", "chunks": 2}, 2, 4, 1),
    ({"model_parallel_size": 8, "schedule": "zb_v"}, 3, 6, 1),
    ({"stage_to_rank_map": {"0": [0, 1], "1": [2]}}, 2, 2, 1),
    ({"model_parallel_size": 4, "schedule": "pipedream"}, 1, 1, 1)])
def test_another_number_of_ranks(parallel: dict[str, object], ranks: int, stages: int, replicas: int) -> None:
    fit = fitted(config(**parallel), ranks)
    assert ranks_of(fit) == ranks
    assert (fit.parallel.model_parallel_size, fit.parallel.data_parallel_size) == (stages, replicas)
    assert fit.parallel.partition == "auto"
    assert fit.training == config(model_parallel_size=1).training


@pytest.mark.parametrize(("every", "kept", "said"), [
    (1, 2, None), (2, 4, None), (8, 8, "an update has 8 microbatches instead of 16, at the same learning rate, and "
                                       "training.max_steps counts updates")])
def test_an_update_keeps_its_samples_where_that_comes_out_even(every: int, kept: int, said: str | None,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    before = config(model_parallel_size=2, data_parallel_size=2, schedule="pipedream", update_every=every)
    fit = fitted(before, 2)
    assert (fit.parallel.data_parallel_size, fit.parallel.update_every) == (1, kept)
    assert capsys.readouterr().err == ("" if said is None else f"elastic: {said}\n")


def test_values_per_stage_are_planned_anew() -> None:
    fit = fitted(config(partition=[2, 2, 1], recompute=[0.5, 0.0, 0.0], compress=["int8", "int8"]), 2)
    assert (fit.parallel.recompute, fit.parallel.compress) == ("auto", "int8")
    assert fitted(config(model_parallel_size=3, recompute=0.5), 2).parallel.recompute == 0.5
    with pytest.raises(UserError, match="for each of 2 cuts"):
        fitted(config(partition=[2, 2, 1], compress=["int8", "none"]), 2)


def test_a_schedule_in_a_file_is_for_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--ranks", "4", "--microbatches", "8", "--format", "csv"]) == 0
    (tmp_path / "own.csv").write_text(capsys.readouterr().out)
    with pytest.raises(UserError, match=r"elastic: 2 ranks are there, but the schedule is a file, .* for 4"):
        fitted(config(model_parallel_size=4, schedule=str(tmp_path / "own.csv")), 2)
