"""Runs that fail and are started again, with real ranks: by vpipe itself and by torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import fork_server
import pytest
from small_run import check_updates, losses, only_run, oracle, write_config
from test_run_ends import VPIPE, until
from test_torchrun import TORCHRUN

from vpipe.app.config.config import load_config
from vpipe.app.errors import LastingError
from vpipe.app.launch.launcher import run
from vpipe.app.launch.network import free_port
from vpipe.app.train.job import Job
from vpipe.errors import RunError, UserError

pytestmark = [pytest.mark.jobs, pytest.mark.usefixtures("forked")]


def rank(number: int, folder: Path) -> int:
    """The process of a rank of the run in a folder, once it is there."""
    found: list[int] = []

    def there() -> bool:
        found[:] = [pid for pid, environment in fork_server.running().items()
                    if environment.get("HERE") == str(folder) and environment.get("RANK") == str(number)]
        return bool(found)

    until(there, 20, f"rank {number}")
    return found[0]


def start(folder: Path, *command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "HERE": str(folder)})


def saves(folder: Path, count: int) -> None:
    until(lambda: len(list(folder.glob("runs/*/checkpoints/step-*[0-9]"))) >= count, 40, "a checkpoint")


def test_a_killed_rank(tmp_path: Path) -> None:
    """The losses are those of one device; the second attempt is named on stderr."""
    config = write_config(tmp_path, training__max_steps=40, checkpoint__every_steps=10, checkpoint__at_end=True)
    with start(tmp_path, VPIPE, "train", config, "--restarts", "1") as process:
        saves(tmp_path, 1)
        os.kill(rank(1, tmp_path), signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    folder = only_run(tmp_path / "runs")
    [attempt] = [line for line in err.splitlines() if line.startswith("attempt ")]
    assert re.fullmatch(r"attempt 2 of 2: rank 1 \(stage 1\) died without a message, killed by signal 9 "
                        r"\(SIGKILL\); rank 0 .*; going on from step \d+", attempt)
    assert out.splitlines()[0] == out.splitlines()[-1] == f"run folder: {folder}"
    assert "error" not in err
    check_updates(folder, 40)
    assert losses(folder) == oracle(Job.from_config(load_config(config)), 40).losses
    assert (folder / "earlier/1/config.yaml").exists()
    assert not list(folder.rglob("*.tmp"))


def test_torchrun_starts_other_ranks_again_than_the_config_says(tmp_path: Path) -> None:
    """A run on three processes, by a config for two, goes on in its folder."""
    config = write_config(tmp_path, training__max_steps=40, checkpoint__every_steps=10)
    config.write_text(config.read_text() + "elastic: true\n")
    command = [word if word != "2" else "3" for word in TORCHRUN]
    with start(tmp_path, *command, "--master-port", free_port(None), "--max-restarts", "1", "-m", "vpipe", "train",
               config, "--set", "machines=[hostA:0, hostB:0]") as process:
        saves(tmp_path, 1)
        os.kill(rank(2, tmp_path), signal.SIGKILL)
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    folder = only_run(tmp_path / "runs")
    assert "elastic: torchrun started 3 processes; the config has 2 ranks, and is partitioned again" in err
    assert re.search(r"^attempt 2: rank 2 \(stage 2\) died without a message; .*; going on from step \d+$", err, re.M)
    assert out.count(f"run folder: {folder}") == 3  # of each attempt, and of the end
    assert "3 stages" in out
    assert "one process per stage, started by torchrun; machines is not used\n" in out
    assert (folder / "starter.json").exists()
    check_updates(folder, 40)
    assert losses(folder) == oracle(Job.from_config(load_config(folder / "config.yaml")), 40).losses


@pytest.mark.parametrize(("error", "tries"), [
    (RunError("rank 1 was killed", hint="look there"), 3), (LastingError("loss is nan", hint="look there"), 1),
    (UserError("no such file", hint="look there"), 1), (RunError("rank 1 was killed", hint="look there"), 2)],
    ids=["failure", "lasting", "mistake", "same"])
def test_failures_that_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, tries: int,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    attempts: list[Any] = []

    def fail(here: Any, folder: Path, *more: Any) -> None:
        attempts.append(here.task)
        step = 7 if tries == 2 else len(attempts)
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')
        raise error

    monkeypatch.setattr("vpipe.app.launch.local.run_ranks", fail)
    with pytest.raises(type(error), match=r"look there") as caught:
        run(load_config(write_config(tmp_path)), None, 2)
    assert attempts == [("train",)] * tries  # a failure after a signal is a lasting one: test_local.py
    why = {3: "it was attempt 3 of 3", 2: "the same failure came twice in a row after step 7, so it would come again"}
    assert str(caught.value).partition("not started again: ")[2].partition(";")[0] == why.get(tries, "")
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("attempt")] == [
        f"attempt {number} of 3: rank 1 was killed; starting from the beginning, since there is no checkpoint yet"
        for number in range(2, tries + 1)]
