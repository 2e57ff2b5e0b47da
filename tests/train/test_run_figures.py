"""The figures of a run, by hand."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import job_of, write_config

from vpipe.config.config import load_config
from vpipe.profiling.peak_flops import PeakFlops
from vpipe.runtime.step_results import Step
from vpipe.runtime.usage import StageUsage
from vpipe.train import metrics as module
from vpipe.train.csv_rows import config_row, csv_text
from vpipe.train.metrics import Efficiency, Metrics, PastMetrics, StepSize
from vpipe.train.model_settings import model_flops
from vpipe.train.summary import RunFigures, p95


def made(monkeypatch: pytest.MonkeyPatch, seconds: list[float], past: PastMetrics | None = None,
         efficiency: Efficiency | None = None) -> Metrics:
    now = 10.0
    monkeypatch.setattr(module, "perf_counter", lambda: now)
    metrics = Metrics(None, StepSize(4, 64, efficiency), past, first=0 if past is None else len(past.losses))
    for index, took in enumerate(seconds):
        now += took
        metrics.update(Step(metrics.steps, 4.0 - index, 0.1, None, stop=False))
    return metrics


USAGE = replace(StageUsage.empty(), idle_s=1.0, bytes_sent=700, peak_memory_bytes=5, versions=1)


def test_speeds_leave_the_first_updates_out(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = made(monkeypatch, [9.0, 5.0, 1.0, 2.0, 1.0, 1.0])
    figures = RunFigures.from_metrics(metrics, [USAGE], ((0,),))
    assert figures is not None
    assert (figures.steps, figures.counted_steps, figures.time_s) == (6, 4, 19.0)
    assert (figures.samples_per_s, figures.tokens_per_s) == (3.2, 51.2)
    assert (figures.step_median_s, figures.step_p95_s) == (1.0, pytest.approx(1.85))
    short = RunFigures.from_metrics(made(monkeypatch, [9.0, 5.0, 1.0, 1.0]), [USAGE], ((0,),))
    assert short is not None
    assert (short.counted_steps, short.tokens_per_s) == (4, 16.0)


def test_ranks_count_once_however_many_stages_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = made(monkeypatch, [2.0, 2.0])
    mine = replace(USAGE, forward_s=0.25, backward_s=0.5, step_s=0.25, communication_s=1.0)
    other = replace(mine, idle_s=2.0, bytes_sent=100, peak_memory_bytes=9, staleness=1, communication_s=0.0)
    figures = RunFigures.from_metrics(metrics, [mine, other, other, mine], ((0,), (1,), (1,), (0,)))
    assert figures is not None
    assert figures.bubble == (1 / 4 + 2 / 4) / 2  # twice a second's work, one of handing over, one of waiting
    assert (figures.ranks, figures.sent_bytes, figures.memory_bytes) == (2, 400.0, 9)
    assert (figures.staleness, figures.versions) == (1, 1)


def test_a_run_that_went_on_has_the_speeds_of_this_attempt_and_the_losses_of_all(
        monkeypatch: pytest.MonkeyPatch) -> None:
    past = PastMetrics(["..."] * 4, [8.0] * 4, [(3, 7.5)], time_s=400.0)
    figures = RunFigures.from_metrics(made(monkeypatch, [1.0, 1.0], past), [USAGE], ((0,),))
    assert figures is not None
    assert (figures.steps, figures.steps_done, figures.time_s, figures.tokens_per_s) == (2, 6, 2.0, 64.0)
    assert (figures.first_loss, figures.last_loss, figures.evaluation_loss) == (8.0, 3.0, 7.5)


def test_p95() -> None:
    assert p95([3.0]) == 3.0
    assert p95([float(n) for n in range(101)]) == 95.0


def test_the_same_figures_as_json_and_as_csv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    efficiency = Efficiency((1e6,), 1e6, PeakFlops(1 / 3, 4, "bf16", "measured"))
    figures = RunFigures.from_metrics(made(monkeypatch, [2.0, 2.0], efficiency=efficiency), [USAGE], ((0,),))
    assert figures is not None
    row, content = figures.as_row(), json.loads(json.dumps(figures.as_json()))
    assert {**row, "usage_steps": 2, "stages": content["stages"]} == content
    assert (row["mfu"], row["hfu"], row["peak_tflops"], row["devices"]) == (7.2e-05, 9.6e-05, 0.333333, 4)
    assert row["peak_is"] == "4 x 0.3333 TFLOP/s bf16, measured"
    config = load_config(write_config(tmp_path))
    [cells] = csv.DictReader(io.StringIO(csv_text([config_row(config) | row])))
    assert (cells["model.hidden_size"], cells["training.learning_rate"], cells["trace"]) == ("16", "0.01", "false")
    assert (cells["checkpoint.at_end"], cells["training.epochs"], cells["evaluation_loss"]) == ("false", "", "")
    assert (cells["mfu"], cells["peak_is"]) == ("7.2e-05", row["peak_is"])


def test_rows_of_other_columns_make_one_table() -> None:
    assert csv_text([{"a": 1, "b": [1, 2]}, {"a": None, "c": True}]) == 'a,b,c\n1,"[1, 2]",\n,,true\n'


def test_operations_of_the_layers_that_are_recomputed_count_for_hfu_only(tmp_path: Path) -> None:
    job = job_of(tmp_path, parallel__recompute=[0.0, 0.5], metrics__peak_tflops=1e-6)
    flops = model_flops(job.config.model, len(job.model))
    efficiency = Efficiency.from_job(job)
    assert flops is not None
    assert efficiency is not None
    assert efficiency.recompute_flops == flops[4]  # of the layers 3 and 4 of the second stage
    assert efficiency.peak == PeakFlops(1e-6, 1, "fp32", "as metrics.peak_tflops says")
    used = efficiency.utilization(1.0)
    assert used.model == pytest.approx(3 * sum(flops) / 1e6)
    assert used.hardware == pytest.approx((3 * sum(flops) + flops[4]) / 1e6)
