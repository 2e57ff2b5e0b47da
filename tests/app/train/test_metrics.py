"""What ``metrics.jsonl`` holds, and whose time counts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

from vpipe.app.run_log import PastMetrics
from vpipe.app.train import metrics as module
from vpipe.app.train.metrics import Efficiency, LineWriter, Metrics, ProgressBar, StepSize
from vpipe.app.train.peak_flops import PeakFlops
from vpipe.errors import UserError
from vpipe.runtime.step_results import Step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def step(index: int, loss: float = 1.0, norm: float | None = None) -> Step:
    return Step(index, loss, 0.5, norm, stop=False)


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_there_as_soon_as_its_update_has_ended(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "m.jsonl"
    with Metrics(path, StepSize(4, 64)) as metrics:
        clock.now += 0.5
        metrics.update(step(0, 2.5))
        assert read(path) == [{"step": 0, "loss": 2.5, "learning_rate": 0.5, "time_s": 0.5, "step_s": 0.5,
                               "samples_per_s": 8.0, "tokens_per_s": 128.0}]
        clock.now += 0.25
        metrics.update(step(1, 1.5, norm=3.0))
        assert read(path)[1] == {"step": 1, "loss": 1.5, "learning_rate": 0.5, "time_s": 0.75, "step_s": 0.25,
                                 "samples_per_s": 16.0, "tokens_per_s": 256.0, "gradient_norm": 3.0}
    assert (metrics.losses, metrics.update_s) == ([2.5, 1.5], [0.5, 0.25])


def test_a_line_has_whatever_else_a_step_knows(tmp_path: Path, clock: Clock) -> None:
    @dataclass(frozen=True)
    class Later(Step):
        clip_factor: float | None = None

    with Metrics(tmp_path / "m.jsonl", StepSize(4, 64)) as metrics:
        clock.now += 0.5
        metrics.update(Later(0, 1.0, 0.5, 0.0, False, clip_factor=0.25), Later(1, 1.0, 0.5, None, False, skipped=True))
    assert [list(line.items())[7:] for line in read(tmp_path / "m.jsonl")] == [
        [("gradient_norm", 0.0), ("clip_factor", 0.25)], [("skipped", True)]]


def test_the_time_of_an_evaluation_does_not_count(tmp_path: Path, clock: Clock) -> None:
    with Metrics(tmp_path / "m.jsonl", StepSize(4, 64)) as metrics:
        clock.now += 1
        metrics.update(step(0))
        clock.now += 50
        metrics.evaluation(0, 3.5)
        clock.now += 2
        metrics.update(step(1))
    assert [line["time_s"] for line in read(tmp_path / "m.jsonl")] == [1.0, 1.0, 3.0]
    assert read(tmp_path / "m.jsonl")[1] == {"step": 0, "evaluation_loss": 3.5, "time_s": 1.0}
    assert metrics.evaluations == [(0, 3.5, None)]
    assert (metrics.time_s, metrics.update_s) == (3.0, [1.0, 2.0])


def test_updates_that_end_together_share_their_time(tmp_path: Path, clock: Clock) -> None:
    with Metrics(tmp_path / "m.jsonl", StepSize(1, 10)) as metrics:
        clock.now += 3
        metrics.update(step(0), step(1), step(2))
        metrics.update()
    assert [(line["time_s"], line["tokens_per_s"]) for line in read(tmp_path / "m.jsonl")] == [
        (1.0, 10.0), (2.0, 10.0), (3.0, 10.0)]


def test_recent_speed_is_of_the_last_twenty(clock: Clock) -> None:
    metrics = Metrics(None, StepSize(1, 10))
    assert metrics.recent_tokens_per_s == 0
    for i in range(40):
        clock.now += 1 if i < 20 else 0.5
        metrics.update(step(i))
    assert metrics.recent_tokens_per_s == 20


EFFICIENCY = Efficiency((3e6, 7e6), 7e6, PeakFlops(0.01, 2, "fp32", "measured"))
"""30 MFLOP a token, 37 with what is computed again, of 2 x 10 GFLOP/s."""


def test_lines_say_how_well_an_update_used_the_devices(tmp_path: Path, clock: Clock) -> None:
    with Metrics(tmp_path / "m.jsonl", StepSize(4, 64, EFFICIENCY)) as metrics:
        clock.now += 0.5
        metrics.update(step(0))
        metrics.summary({"mfu": 0.2, "stages": []})
    line, last = read(tmp_path / "m.jsonl")
    assert (line["mfu"], line["hfu"]) == (0.192, 0.2368)  # 128 tokens/s
    assert last == {"step": 0, "summary": {"mfu": 0.2, "stages": []}}


def test_a_speed_that_cannot_be_is_doubted_once(clock: Clock) -> None:
    metrics = Metrics(None, StepSize(4, 64, EFFICIENCY))
    said = []
    for index in range(45):
        clock.now += 0.2 if index < 21 else 0.05  # 48 % of the peak, then 192 %
        metrics.update(step(index))
        said += metrics.warnings()
    assert said == [
        "the HFU of 101 % cannot be: the peak is wrong (2 devices x 0.01 TFLOP/s fp32, measured); the devices reached "
        "0.01008 TFLOP/s each, so set metrics.peak_tflops to more than that"]


def test_lines_that_a_crash_lost_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert PastMetrics.read(tmp_path, 5).missing == []
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (2, 3, 6, 8)) + '{"step": 9, "lo')
    assert PastMetrics.read(tmp_path, 4).missing == []
    assert PastMetrics.read(tmp_path, 11).missing == [(4, 5), (7, 7), (9, 10)]


@pytest.mark.parametrize(("steps", "minutes", "left"), [
    (28, None, "00:02"), (50_000, 0.1, "00:03"), (28, 0.1, "00:02"), (None, 0.1, "00:03"), (None, None, None)])
def test_the_time_left_is_that_of_the_steps_of_this_attempt(
        clock: Clock, capsys: pytest.CaptureFixture[str], steps: int | None, minutes: float | None,
        left: str | None) -> None:
    """It begins after step 20 of another run, whose seconds nobody knows."""
    metrics = Metrics(None, StepSize(4, 64), first=20)
    with ProgressBar(steps, 1, True, "update", 20, minutes) as progress:
        for index in (20, 21, 22, 23):
            clock.now += 0.75 if index > 20 else 0.25
            metrics.update(step(index))
            progress.update(step(index), metrics)
    of = "" if steps is None else f"/{steps}"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"update 24{of}: loss 1.000  102 tokens/s  00:02" + ("" if left is None else f", {left} left")


class Disk:
    """``os.write`` with room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 0
        self._write = os.write
        monkeypatch.setattr("vpipe.app.train.metrics.os.write", self.write)

    def write(self, file: int, data: bytes) -> int:
        taken = min(self.room, len(data))
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return self._write(file, bytes(data[:taken]))


def test_lines_wait_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "a"
    path.write_text("before\n")
    lines = LineWriter(path, truncate=False)
    disk.room = 7
    lines.write("one")
    lines.write("two")  # half of it
    assert (path.read_text(), lines.waiting, lines.error) == ("before\none\ntwo", 1, "No space left on device")
    lines.write("three")
    assert lines.waiting == 2
    disk.room = 100
    lines.write("four")
    assert (lines.waiting, lines.error) == (0, None)
    lines.sync()
    lines.close()
    assert path.read_text() == "before\none\ntwo\nthree\nfour\n"


def test_waiting_lines_are_written_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "a"
    path.write_text("before\n")
    lines = LineWriter(path, truncate=True)
    lines.write("one")
    assert path.read_text() == ""
    disk.room = 100
    lines.close()
    lines.close()
    lines.sync()  # the saver's thread may come late
    assert (path.read_text(), lines.error) == ("one\n", None)


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write '.*none/a': No such file"):
        LineWriter(tmp_path / "none" / "a", truncate=True)


@pytest.mark.parametrize(("norm", "next_tokens", "said"), [
    (0.5112, False, "loss 6.236  grad norm 0.511  1,280 tokens/s  13:30 left"),
    (0.5112, True, "loss 6.236  ppl 511  1,280 tokens/s  13:30 left"),
    (None, False, "loss 6.236  1,280 tokens/s  13:30 left")])
def test_the_bar_says_what_it_counts_and_fits_80_columns(monkeypatch: pytest.MonkeyPatch, norm: float | None,
                                                         next_tokens: bool, said: str) -> None:
    now = iter(range(100))
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(now)))
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    metrics = Metrics(None, StepSize(8, 1280, next_tokens=next_tokens))
    step = Step(389, 6.236, 0.1, norm, stop=False)
    metrics.update(step)
    with os.fdopen(terminal, "w") as stderr, os.fdopen(screen, "rb", buffering=0) as shown:
        monkeypatch.setattr(sys, "stderr", stderr)
        with ProgressBar(1200, 10, show=True, name="update", done=389) as progress:
            progress.update(step, metrics)
            progress._bar.refresh()
            text = ""
            while said not in text:  # a pseudo-terminal passes on what is written bit by bit
                text += shown.read(10_000).decode()
    [line] = {line for line in text.split("\r") if said in line}
    assert line.startswith("update 390/1200 |")
    assert line.endswith(f"| {said}")
    assert len(line) < 80
