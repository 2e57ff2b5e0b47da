"""The summary at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import job_of

from vpipe.runtime.step import Step
from vpipe.runtime.usage import StageUsage
from vpipe.train import metrics as module
from vpipe.train.metrics import Metrics
from vpipe.train.report import summary


def test_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(module, "perf_counter", lambda: next(now) / 4)
    job = job_of(tmp_path, parallel__partition=[3, 2])
    metrics = Metrics(None, job.tokens_per_update)
    for i in range(8):
        metrics.update(Step(i, 8.0 - i, 0.1, None, stop=False))
    metrics.evaluation(7, 2.0)
    usages = [StageUsage(forward_s=0.4, backward_s=0.8, step_s=0.08, communication_s=0.008, idle_s=0.016, bytes_sent=n,
                         versions=2, staleness=1, peak_activations=2, peak_memory_bytes=3.5e9) for n in (8000, 1.6e7)]
    assert summary(job, metrics, usages).splitlines() == [
        "8 updates in 2.0 s: 32.0 samples/s, 512 tokens/s, 250 ms per update (median)",
        "training loss 7.500 -> 1.500 (mean of the first 2, mean of the last 2)",
        "evaluation loss after 8 updates: 2.0000",
        "",
        "stage  layers  forward  backward     step    comm    idle    sent  versions  staleness  in flight   memory",
        "    0     0-2  50.0 ms  100.0 ms  10.0 ms  1.0 ms  2.0 ms  1.0 kB         2          1          2  3.50 GB",
        "    1     3-4  50.0 ms  100.0 ms  10.0 ms  1.0 ms  2.0 ms  2.0 MB         2          1          2  3.50 GB",
        "(per update; idle is waiting for other stages; memory is the peak of the process)"]


def test_the_summary_of_one_update(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    metrics = Metrics(None, job.tokens_per_update)
    metrics.update(Step(0, 3.0, 0.1, None, stop=True))
    lines = summary(job, metrics, [StageUsage.empty()] * 2).splitlines()
    assert lines[0].startswith("1 update in 0.0 s: ")
    assert lines[1] == "training loss 3.000 -> 3.000 (mean of the first 1, mean of the last 1)"
