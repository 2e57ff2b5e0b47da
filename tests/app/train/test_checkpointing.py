"""Which checkpoints a run has made at its end, where they are, and what becomes of it when one cannot be made."""

from __future__ import annotations

import errno
import json
import os
import re
from itertools import islice
from pathlib import Path
from threading import Event, current_thread
from threading import enumerate as enumerate_threads
from time import perf_counter, sleep
from typing import Any
from unittest.mock import Mock

import pytest
from attempts import begin, go_on
from small_run import check_updates, metrics, write_config
from torch import Tensor

from vpipe.app.config.config import Config, load_config
from vpipe.app.errors import LastingError
from vpipe.app.train import loop
from vpipe.app.train.checkpointing import Checkpointing
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.metrics import LineWriter
from vpipe.checkpoint import Manifest
from vpipe.checkpoint import save as saver
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.shards import HostBuffer
from vpipe.errors import RunError, UserError
from vpipe.pipeline import Pipeline


def test_only_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    room, takes = HostBuffer._allocate, []

    def make_room(self: HostBuffer, count: int, pinned: bool) -> None:
        takes.append((current_thread().name, count))
        room(self, count, pinned)

    monkeypatch.setattr(HostBuffer, "_allocate", make_room)
    run = begin(tmp_path, checkpoint__every_steps=1, checkpoint__keep=2)
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-3", "step-4"]
    assert re.search(r"^4 checkpoints of [\d.]+ MB, 2 kept, the last of step 4 in ", capsys.readouterr().out, re.M)
    size = takes[0][1]
    assert takes == [("vpipe-saver", size), ("MainThread", size)], "memory is not taken in the first pause"


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
    built = loop.build_pipeline

    def build(job: Job) -> Pipeline:
        pipe = built(job)
        weights.extend(p.data for stage in pipe.engine.local_stages for p in stage.weights.masters.values())
        return pipe

    monkeypatch.setattr(loop, "build_pipeline", build)
    monkeypatch.setattr(Job, "training_batches", spoiled)
    folder = tmp_path
    if on_nan == "skip":
        begin(folder, training__on_nan="skip", training__max_steps=3, parallel__partition=[5],
              parallel__model_parallel_size=1)
        shown = capsys.readouterr()
        assert "update 3 was skipped: loss is nan" in shown.err
        assert "1 of 3 updates were skipped: not finite\ntraining loss" in shown.out
    else:
        with pytest.raises(LastingError, match="loss is nan at step 2") as caught:
            begin(folder, checkpoint__every_steps=1, parallel__partition=[5], parallel__model_parallel_size=1)
        assert "go on from step 2, such as: vpipe train --resume " in caught.value.hint
    [run] = (folder / "runs").iterdir()
    lines = metrics(run)[0]
    assert [line["loss"] is None for line in lines] == [False, False, True]
    assert lines[2].get("skipped") is (True if on_nan == "skip" else None)
    if on_nan == "stop":
        assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-1", "step-2"]


def full_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk have no room for the checkpoint of a step."""
    written = saver.write_shards

    def write(partial: Path, *rest: Any) -> Any:
        if partial.name == f"step-{step}.tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(partial, *rest)

    monkeypatch.setattr(saver, "write_shards", write)


@pytest.mark.parametrize(("given_up", "every", "remedy"), [
    (4, None, "there is no checkpoint to resume from"), (4, 1, "then go on from step 3 with: vpipe train --resume "),
    (2, 1, "then go on from step 1 with: vpipe train --resume ")])
def test_a_disk_that_fills_up_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str], given_up: int, every: int | None,
                                           remedy: str) -> None:
    full_at(given_up, monkeypatch)
    with pytest.raises(RunError, match=f"the checkpoint of step {given_up} could not be saved: No space") as caught:
        begin(tmp_path, checkpoint__every_steps=every, checkpoint__keep=None, checkpoint__at_end=True)
    [run] = (tmp_path / "runs").iterdir()
    assert caught.value.hint == (
        f"make room on the disk of '{run}/checkpoints' (df -h shows what is free), or lower checkpoint.keep, or set "
        f"checkpoint.directory to a folder on another disk; {remedy}" + f"{run}" * remedy.endswith(" "))
    assert isinstance(caught.value, LastingError) == (given_up == 2), "a run that has ended has its figures"
    assert ("4 updates in" in capsys.readouterr().out) == (given_up == 4)
    left = {"latest", *(f"step-{step}" for step in range(1, given_up))} if every else set()
    assert set(os.listdir(run / "checkpoints")) == left


def test_a_folder_that_not_all_hosts_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: Any) -> None:
        raise UserError("rank 1 (b) does not see it", hint="set checkpoint.directory")

    monkeypatch.setattr("vpipe.checkpoint.Checkpoints.check_shared", refused)
    with pytest.raises(UserError, match="rank 1"):
        begin(tmp_path / "a", checkpoint__at_end=True)
    (tmp_path / "b").mkdir()
    config = load_config(write_config(tmp_path / "b", training__max_steps=1), ["checkpoint=null"])
    train(Job.from_config(config), tmp_path / "b")
    assert "no checkpoints are made: rank 1 (b) does not see it (set checkpoint.directory)" in capsys.readouterr().err


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_that_cannot_be_written_or_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    if not made:
        (folder / "checkpoints").write_text("")
    config = load_config(write_config(tmp_path, training__max_steps=1, checkpoint__at_end=True))
    if made:
        monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(UserError, match=r"rank 0 \(.*\) cannot write checkpoints to '.*': (No space left|File exists)"):
        train(Job.from_config(config), folder)
    train(Job.from_config(config.model_copy(update={"checkpoint": None})), folder)
    assert "no checkpoints are made: rank 0 (" in capsys.readouterr().err


@pytest.mark.parametrize("room", [True, False])
def test_a_disk_that_is_full_for_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    written, calls = os.write, 0

    def write(file: int, data: bytes) -> int:
        nonlocal calls
        calls += os.readlink(f"/proc/self/fd/{file}").endswith("metrics.jsonl")
        if calls in (2, 3) or (calls > 3 and not room):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, data)

    monkeypatch.setattr("vpipe.app.train.metrics.os.write", write)
    if room:
        run = begin(tmp_path)
        check_updates(run, 4)
    else:
        with pytest.raises(LastingError, match=r"the last 5 lines of '.*metrics.jsonl' could not be written: No space"):
            begin(tmp_path)
    shown = capsys.readouterr()
    assert shown.err.count("metrics.jsonl': No space left on device; training continues") == 1
    assert shown.err.count("is whole again") == room
    assert "4 updates in" in shown.out


@pytest.mark.parametrize("changes", [{}, {"training__optimizer": "muon", "training__average": 0.9}])
def test_the_room_for_checkpoints_is_compared_before_the_training(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        changes: dict[str, Any]) -> None:
    run = begin(tmp_path / "a", checkpoint__at_end=True, **changes)
    size = Manifest.load(run / "checkpoints" / "step-4").bytes
    free = [0.8 * size]
    monkeypatch.setattr("shutil.disk_usage", lambda path: Mock(free=free[0]))
    with pytest.raises(UserError, match=r"the run writes checkpoints of [\d.]+ KiB, but the disk of '.*' has "):
        begin(tmp_path / "b", checkpoint__at_end=True, **changes)
    assert not (tmp_path / "b" / "runs").exists()
    free[0] = 1.2 * size
    begin(tmp_path / "c", checkpoint__at_end=True, **changes)
    assert "warning" not in capsys.readouterr().err
    begin(tmp_path / "d", checkpoint__every_steps=3, checkpoint__keep=1, **changes)
    assert re.search(r"warning: the run may hold 2 checkpoints of .*: make room, or lower", capsys.readouterr().err)


def test_all_of_the_pause_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no pause is not done in it."""
    saved = Checkpointing.save

    def save(self: Checkpointing) -> None:
        def untimely(*_: Any) -> str:
            raise AssertionError("in a pause")

        with monkeypatch.context() as patched:
            patched.setattr(Job, "fingerprint", untimely)
            patched.setattr(Config, "resolved_yaml", untimely)
            saved(self)

    monkeypatch.setattr(Checkpointing, "save", save)
    monkeypatch.setattr("vpipe.app.train.checkpointing.perf_counter", lambda: perf_counter() - 1000)
    run = begin(tmp_path, checkpoint__at_end=True, training__max_steps=1)
    [line] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"pause_s"' in line]
    assert line["pause_s"] >= 1000
    assert line["save_s"] >= line["pause_s"]


def test_metrics_reach_the_disk_before_the_checkpoint_has_its_name(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    synced, committed = LineWriter.sync, Checkpoints.commit

    def sync(self: LineWriter) -> None:
        synced(self)
        order.append("metrics")

    def commit(self: Checkpoints, step: int) -> Path:
        order.append(f"step {step}")
        return committed(self, step)

    monkeypatch.setattr(LineWriter, "sync", sync)
    monkeypatch.setattr(Checkpoints, "commit", commit)
    run = begin(tmp_path, checkpoint__every_steps=2)
    assert order == ["metrics", "step 2", "metrics", "step 4"]
    path = run / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"step": 1, "loss"' not in line))
    go_on(run, at=2)
    assert "warning: metrics.jsonl lacks lines of steps that are done: 1\n" in capsys.readouterr().err
    assert [line["step"] for line in metrics(run)[0]] == [0, 2, 3]


@pytest.mark.parametrize("peer", [None, 1])
def test_a_rank_that_fails_lets_the_save_be_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      peer: int | None) -> None:
    """Unless another rank is to blame, which may be gone."""
    failed, batches, written = Event(), Job.training_batches, saver.write_shards

    def failing(self: Job, fields: tuple[str, ...]) -> Any:
        yield from islice(batches(self, fields), 2)
        failed.set()
        raise RunError("the data are gone", hint="bring them back", peer=peer)

    def write(*arguments: Any) -> Any:
        assert failed.wait(60)
        sleep(0.3)
        return written(*arguments)

    monkeypatch.setattr(Job, "training_batches", failing)
    monkeypatch.setattr(saver, "write_shards", write)
    with pytest.raises(RunError, match="the data are gone"):
        begin(tmp_path, checkpoint__every_steps=2)
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "checkpoints" / "step-2").exists() is (peer is None)
    for thread in enumerate_threads():
        if thread.name == "vpipe-saver":
            thread.join(60)
