"""A run with Orion: what it says when it is active and when not, and that its numbers are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_run import job_of, losses, write_config

from vpipe.app.cli import main
from vpipe.app.train.loop import train
from vpipe.errors import UserError
from vpipe.extras.orion.run import _first_inactive, orion_lines
from vpipe.extras.orion.scheduler import Inactive, OrionScheduler
from vpipe.runtime import Worker

pytestmark = pytest.mark.extras("async_threaded")

CHANGES = {"parallel__schedule": "gpipe", "parallel__executor": "async_threaded", "training__max_steps": 2}


class Library(OrionScheduler):
    """Counts as the library would, and notes what it is asked."""

    def __init__(self) -> None:
        self.stopped = 0

    def client_stats(self, client: int) -> dict[str, int]:
        return {"submitted": 1000 * (1 + client), "queued": client, "starved": client // 3, "waiting": 0,
                "wait_ns": 1_000_000 * client, "max_wait_ns": 500_000 * client}

    def totals(self) -> dict[str, int]:
        return {"gated": 10_000}

    def stop(self) -> None:
        self.stopped += 1


def test_inactive_and_active_runs_have_the_losses_of_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("without", "inactive", "active")]
    library, started, threads = Library(), [], []

    def start(*device_and_clients: object) -> OrionScheduler:
        started.append(device_and_clients)
        return library

    whole = Worker.backward

    def backward(worker: Worker, stage: int, microbatch: int) -> None:
        threads.append(torch._C._is_multithreading_enabled())
        whole(worker, stage, microbatch)

    for folder in folders:
        folder.mkdir()
        if folder.name == "active":
            monkeypatch.setattr("vpipe.extras.orion.run.start", start)
            monkeypatch.setattr(Worker, "backward", backward)
        train(job_of(folder, **CHANGES, parallel__use_orion_scheduler=folder.name != "without"), folder)
        said = capsys.readouterr()
        text = said.out + said.err
        assert ("orion: inactive (ranks compute on cpu" in said.out) == (folder.name == "inactive")
        assert ("warning: orion: inactive" in text) == (folder.name == "inactive")
        summary = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["summary"]
        assert summary.get("orion", {}).get("active") == {"without": None, "inactive": False, "active": True}[
            folder.name]
    assert "orion: active on 1 rank\n" in said.out
    assert [line.split() for line in said.out.splitlines() if line.startswith("         3")] == [
        ["3", "4,000", "3", "1", "3.0", "ms", "1.50", "ms"]]
    assert started == [("cpu", 0, 4)]
    assert library.stopped == 1
    assert set(threads) == {False}
    assert torch._C._is_multithreading_enabled()
    assert losses(folders[0]) == losses(folders[1]) == losses(folders[2])


def test_strict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Orion is inactive: ranks compute on cpu, which launches no") as raised:
        train(job_of(tmp_path, **CHANGES, parallel__use_orion_scheduler=True, parallel__orion_strict=True), tmp_path)
    assert raised.value.problems[0].hint == ("compute on GPUs: parallel.device: cuda; or set parallel.orion_strict: "
                                             "false")


def test_the_environment_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("USE_ORION_SCHEDULER", "1")
    assert main(["train", str(write_config(tmp_path))]) == 2
    said = capsys.readouterr().err
    assert ("error: parallel.use_orion_scheduler is true, but the executor is overlapped, which has one stream for all "
            "microbatches (--set parallel.use_orion_scheduler)\nhint: set executor: async_threaded, or "
            "use_orion_scheduler: false") in said


def test_a_rank_without_a_gated_kernel_is_named() -> None:
    stats = dict.fromkeys(("submitted", "queued", "starved", "wait_ns", "max_wait_ns"), 0)
    ranks = [{"rank": rank, "gated": gated, "microbatches": [stats]} for rank, gated in enumerate([5, 0])]
    assert orion_lines({"active": True, "ranks": ranks})[-1] == ("warning: no kernel came through the gate on 1 rank "
                                                                 "(1)")
    assert _first_inactive(["", json.dumps(["a", "b"])]) == '["rank 1: a", "b"]'
    assert orion_lines({"active": False, "reason": "a", "remedy": "b"}) == [str(Inactive("a", "b"))]
