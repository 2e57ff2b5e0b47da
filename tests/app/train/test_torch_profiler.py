"""The profile of one step that a run makes for TensorBoard and Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import job_of, losses

from vpipe.app.config.config import Config
from vpipe.app.train.loop import train
from vpipe.app.train.resume import ResumePoint
from vpipe.app.train.torch_profiler import profile_name
from vpipe.errors import UserError
from vpipe.runtime import action_recorder as labels
from vpipe.runtime.worker import Worker

TINY = {"training__evaluation_batches": 1, "model__num_layers": 1, "parallel__partition": [2, 1]}


def events(run: Path, name: str, step: int) -> list[dict[str, Any]]:
    """What the one file holds. In one process all ranks are in the first one's."""
    [folder] = run.glob("profiler_*")
    assert folder.name == f"profiler_{name}"
    [file] = [path for path in folder.rglob("*") if path.is_file()]
    assert file == folder / "rank0" / f"rank0.{step}.pt.trace.json"
    return [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]


def labelled(found: list[dict[str, Any]]) -> list[str]:
    """The labels of actions, sorted."""
    return sorted(event["name"] for event in found if event["cat"] == "user_annotation" and event["name"][0].isdigit())


def within(outer: dict[str, Any], found: list[dict[str, Any]]) -> set[str]:
    """The names of what went on inside."""
    return {event["name"] for event in found if event["tid"] == outer["tid"] and event is not outer
            and outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]}


@pytest.fixture
def labelled_workers(monkeypatch: pytest.MonkeyPatch) -> set[Worker]:
    """The workers whose actions got labels in the test."""
    found: set[Worker] = set()

    def put(worker: Worker, *action: Any) -> None:
        found.add(worker)
        labels.labelled(worker, *action)

    monkeypatch.setattr("vpipe.pipeline.labelled", put)
    return found


def test_one_step_is_profiled_and_the_run_ends_in_good_order(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], labelled_workers: set[Worker]) -> None:
    """Its actions are named as the record of a run names them, with the operations of torch inside."""
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    plain.mkdir()
    profiled.mkdir()
    train(job_of(plain, **TINY), plain)
    job = job_of(profiled, **TINY, training__profile_iteration=2, training__exit_after_profile=True,
                 checkpoint__at_end=True)
    assert train(job, profiled) is None
    assert losses(profiled) == losses(plain)[:2]
    assert [path.name for path in (profiled / "checkpoints").glob("step-*")] == ["step-2"]
    said = capsys.readouterr()
    assert (f"update 2 is profiled: TensorBoard and Perfetto open {profiled / 'profiler_1f1b'}, a folder per rank; the "
            "run ends here (training.exit_after_profile)\n") in said.err
    assert "2 updates in " in said.out
    assert {worker.rank for worker in labelled_workers} == {0, 1}
    assert not any(worker.around for worker in labelled_workers)

    found = events(profiled, "1f1b", 2)
    assert labelled(found) == sorted(
        f"{action.stage}{action.op}{action.microbatch + (4 if action.op.per_microbatch else 1)}"
        for program in job.schedule.programs for action in program)  # of 4 microbatches, and a version, before it
    by_name = {event["name"]: event for event in found}
    assert {"ProfilerStep#2"} <= set(by_name)
    assert set(labelled(found)) <= within(by_name["ProfilerStep#2"], found)
    assert "aten::addmm" in within(by_name["0F4"], found)
    assert any("Backward" in name for name in within(by_name["1B7"], found))

    (profiled / "profiler_1f1b").rename(tmp_path / "kept")
    start = ResumePoint(profiled, profiled / "checkpoints" / "step-2")
    train(job, profiled, start)  # goes on to its end, and profiles no more
    assert losses(profiled) == losses(plain)
    assert not list(profiled.glob("profiler_*"))


def test_a_stream_is_profiled_from_the_end_of_a_step_to_the_end_of_the_next(tmp_path: Path) -> None:
    job = job_of(tmp_path, **TINY, training__profile_iteration=3, training__num_microbatches=1,
                 parallel__schedule="pipedream")
    train(job, tmp_path)
    names = labelled(events(tmp_path, "pipedream", 3))
    assert [name for name in names if name.startswith("0STEP")] == ["0STEP2"]  # the last to end the step
    assert {"0B2", "0F3", "1F3"} <= set(names)  # stages are at different microbatches
    assert len(losses(tmp_path)) == 4


@pytest.mark.parametrize(("executor", "schedule", "name"), [
    ("overlapped", "pipedream", "pipedream"), ("naive", "1f1b", "naive"),
    ("overlapped", "/home/me/a b/zb.1.csv", "zb.1"), ("overlapped", "../x/y", ".._x_y")])
def test_names(tmp_path: Path, executor: str, schedule: str, name: str) -> None:
    config: Config = job_of(tmp_path).config.with_parallel(executor=executor)
    assert profile_name(config, schedule) == name


def test_a_step_that_never_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(job_of(tmp_path, **TINY, training__profile_iteration=100, training__max_steps=None,
                 training__max_minutes=1e-6), tmp_path)
    assert "no profile was made: the run ended before update 100 did\n" in capsys.readouterr().err
    assert not list(tmp_path.glob("profiler_*"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profiler_1f1b").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write the profile '.*rank0\.2\.pt\.trace\.json': (Not a d|File e)"):
        train(job_of(tmp_path, **TINY, training__profile_iteration=2), tmp_path)
