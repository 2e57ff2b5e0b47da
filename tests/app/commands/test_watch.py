"""``vpipe watch``: what it shows of runs that go on, have ended, have failed or are silent, from their files alone."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from attempts import begin
from rich.console import Console

from vpipe.app import run_log
from vpipe.app.cli import main
from vpipe.app.commands.watch import watch
from vpipe.app.config.config import Config
from vpipe.app.launch.failure_report import write_report
from vpipe.app.run_log import RunLog
from vpipe.app.train.run_state import RunState
from vpipe.errors import RunError

TIMES = {"forward_s": 0.2, "backward_s": 0.4, "step_s": 0.1, "communication_s": 0.1, "others_s": 0.0, "idle_s": 0.15,
         "bytes_sent": 9.0}
ENDED = {"tokens_per_s": 640.0, "samples_per_s": 10.0, "steps_done": 4}
HERE = socket.gethostname()


def update(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 8.0 - step, "learning_rate": 0.001, "time_s": step + 1.0, "step_s": 1.0,
            "samples_per_s": 10.0, "tokens_per_s": 640.0, **changes}


def add(folder: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, lines)) + end)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which three of four updates are done, by this process."""
    (tmp_path / "running").write_text(f"process {os.getpid()} on {HERE}\n")
    (tmp_path / "run.json").write_text(json.dumps({
        "updates": 4, "max_minutes": None, "ranks": [[0], [1, 2]], "partition": [1, 1], "planned_s": [0.7, 0.4, 0.5]}))
    add(tmp_path, update(0), {"step": 0, "evaluation_loss": 7.5, "time_s": 1.0}, update(1), update(2))
    ranks = [{"rank": 0, **TIMES}, {"rank": 1, **TIMES, "backward_s": 0.2, "idle_s": 0.35},
             {"rank": 2, **TIMES, "idle_s": None}]
    (tmp_path / "rank_times.jsonl").write_text(json.dumps({"first_step": 1, "last_step": 2, "ranks": ranks}) + "\n")
    return tmp_path


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests beside each other have the width of no terminal."""
    monkeypatch.setenv("COLUMNS", "100")


def shown(capsys: pytest.CaptureFixture[str], folder: Path, status: int = 0) -> tuple[str, str]:
    assert main(["watch", str(folder)]) == status
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 100 + len(str(folder))
    return out, err


def test_a_run_that_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(capsys, run)
    assert err == ""
    folder, status, progress, loss, curve, speed, *table = out.splitlines()
    assert folder == str(run)
    assert status.startswith(f"going (process {os.getpid()} on {HERE}), last line 00:0")
    assert progress.split() == ["update", "3", "of", "4", "━" * 18, "00:03,", "00:01", "left"]
    assert loss == "loss 6.000  learning rate 0.001  evaluation loss 7.5000 after update 1"
    assert curve.strip() == "7.000 █▄▁ 6.000", "of three moments, each with the mean of the losses from there on"
    assert speed == "640 tokens/s  10.0 samples/s"
    assert [row.split() for row in table[1:6]] == [
        ["updates", "2", "to", "3,", "in", "milliseconds", "per", "update:"],
        ["rank", "stage", "forward", "backward", "step", "comm", "idle"],
        ["0", "0", "200.0", "400.0", "100.0", "100.0", "150.0"],
        ["1", "1", "200.0", "200.0", "100.0", "100.0", "350.0"],
        ["2", "1", "200.0", "400.0", "100.0", "100.0", "-"]]
    assert "slowest: rank 0 (stage 0) works 700.0 ms per update, 11 % more than the ranks on average" in out
    assert "beside the plan: rank 2 (stage 1) works 700.0 ms per update, planned were 500.0 (+40 %)" in out


def test_the_view_on_a_terminal_follows_the_run_to_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()

    def seconds(_: float) -> None:
        if "update 4 of 4" not in screen.getvalue():
            add(run, update(3))
        else:
            (run / "running").unlink()
            add(run, {"step": 3, "summary": ENDED})

    monkeypatch.setattr("time.sleep", seconds)
    watch(run, Console(file=screen, force_terminal=True, width=80, height=40, color_system=None))
    seen = [screen.getvalue().find(text) for text in ("update 3 of 4", "update 4 of 4", "ended")]
    assert seen == sorted(seen)
    assert -1 not in seen


def test_ctrl_c_ends_the_view_quietly(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    screen = StringIO()
    watch(run, Console(file=screen, force_terminal=True, width=80, height=40, color_system=None))
    assert "update 3 of 4" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_real_run_that_ended_and_one_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The times of its ranks are those of its summary, without a key of the config."""
    folder = begin(tmp_path, training__max_steps=5)
    capsys.readouterr()
    out, _ = shown(capsys, folder)
    assert out.startswith(f"{folder}\nended\nupdate 5 of 5  ")
    assert "updates 3 to 5, in milliseconds per update:" in out
    state = RunState.read(folder)
    assert state.summary is not None
    assert state.rank_times is not None
    assert [rank.work_s for rank in state.rank_times.ranks] == pytest.approx([
        (own["forward_s"] + own["backward_s"] + own["step_s"]) / 3 for own in state.summary["stages"]])
    (folder / "running").write_text("process 1 on another-host")  # of an attempt that goes on with it
    assert "\ngoing (process" in shown(capsys, folder)[0]


def test_little_is_read_of_a_long_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "TAIL_BYTES", 3000)
    monkeypatch.setattr(run_log, "SAMPLE_BYTES", 400)
    add(run, *(update(step, loss=1000.0 - step) for step in range(3, 1000)))
    state = RunState.read(run)
    assert 10 < len(state.lines) < 30
    assert state.steps == 1000
    sampled = list(RunLog(run).losses(10))
    assert len(sampled) == 10
    assert sampled[0][0] == 0
    assert all(step == pytest.approx(100 * part, abs=15) for part, (step, _) in enumerate(sampled))
    assert all(loss == pytest.approx(1000 - step, abs=3) for step, loss in sampled[1:])


@pytest.mark.parametrize(("text", "steps"), [
    ("", 0), ("\n", 0), ('{"step": 0, "lo', 0), (json.dumps(update(0)) + "\n" + json.dumps(update(1))[:30], 1),
    ('{"step": 0}\n[1]\nnull\n{"step": "x", "loss": 1}\n\x00\n', 0),
    ('{"step": 4, "loss": null, "step_s": "x", "time_s": null}\n', 5)])
def test_files_that_are_empty_or_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str,
                                           steps: int) -> None:
    for name in ("metrics.jsonl", "rank_times.jsonl", "run.json", "running"):
        (tmp_path / name).write_text(text)
    out, _ = shown(capsys, tmp_path)
    assert f"update {steps}" in out


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: there is no run in '{tmp_path}' (looked for config.yaml and metrics.jsonl)",
        "hint: give the folder that 'vpipe train' prints as its run folder"]


@pytest.mark.parametrize("command", ["watch", "trace", "evaluate", pytest.param(
    "sample --prompt a", marks=pytest.mark.extras("generation"))])
def test_a_command_without_a_run_takes_the_one_that_wrote_last(command: str, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    for age, run in ((9, "newest-name"), (1, "an-older-name"), (0, "comparison")):
        (Path("output") / run).mkdir(parents=True)
        (Path("output") / run / ("config.yaml" if run == "comparison" else "metrics.jsonl")).touch()
        for file in (Path("output") / run).iterdir():
            os.utime(file, (time.time() - age,) * 2)
    for words in ([name, *options], [name, "output", *options]):
        main(words)
        assert capsys.readouterr().err.startswith("the newest run: output/an-older-name\n")
    main([name, "output/newest-name", *options])
    assert "the newest run" not in capsys.readouterr().err
    assert Config.model_fields["log_directory"].default == Path("output")


def failed(run: Path) -> None:
    (run / "running").unlink()
    write_report(run, 1, RunError("out of memory", hint="less", rank=1, stage=1))


def killed(run: Path) -> None:
    (run / "running").write_text(f"process {2**22 + 1} on {HERE}")  # above the most that Linux gives


@pytest.mark.parametrize(("end", "error"), [
    (failed, "error: out of memory (rank 1, stage 1)"), (killed, f"its process {2**22 + 1} on {HERE} is gone")])
def test_a_run_that_failed(run: Path, capsys: pytest.CaptureFixture[str], end: Callable[[Path], None],
                           error: str) -> None:
    end(run)
    out, err = shown(capsys, run, status=1)
    assert f"{run}\nfailed, last line " in out
    assert error in err
    (run / "launched").write_text(f"process {os.getpid()} on {HERE}")  # starts it again
    assert "\ngoing (" in shown(capsys, run)[0]


@pytest.mark.parametrize("where", [HERE, "another-host"])
def test_a_run_that_is_silent(run: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    (run / "running").write_text(f"process {os.getpid()} on {where}")
    os.utime(run / "metrics.jsonl", (time.time() - 500,) * 2)
    assert f"\ngoing (process {os.getpid()} on {where}), but silent, last line 08:2" in shown(capsys, run)[0]
