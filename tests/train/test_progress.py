"""The progress bar on a terminal."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios

import pytest

from vpipe.runtime.step_results import Step
from vpipe.train import metrics as module
from vpipe.train.metrics import Metrics, StepSize
from vpipe.train.progress import ProgressBar


@pytest.mark.parametrize(("norm", "said"), [(0.5112, "loss 6.236  grad norm 0.511  1,280 tokens/s  13:30 left"),
                                            (None, "loss 6.236  1,280 tokens/s  13:30 left")])
def test_the_bar_says_what_it_counts_and_fits_80_columns(monkeypatch: pytest.MonkeyPatch, norm: float | None,
                                                         said: str) -> None:
    now = iter(range(100))
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(now)))
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    metrics, step = Metrics(None, StepSize(8, 1280)), Step(389, 6.236, 0.1, norm, stop=False)
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
