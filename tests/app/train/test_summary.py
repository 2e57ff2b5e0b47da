"""The summary at the end of a run."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import job_of, write_config
from torch import nn

from vpipe import Cut, Plan
from vpipe.app.config.config import config_row, load_config
from vpipe.app.data.epoch import HeldOutText
from vpipe.app.run_log import EvaluatedLoss, PastMetrics
from vpipe.app.train import metrics as module
from vpipe.app.train.job import Job
from vpipe.app.train.loop import build_pipeline, train
from vpipe.app.train.metrics import Efficiency, Metrics, StepSize
from vpipe.app.train.model_section import model_flops
from vpipe.app.train.peak_flops import PeakFlops
from vpipe.app.train.summary import RunFigures, evaluation_text, headline, p95, size_lines, summary
from vpipe.app.visualize.table import csv_text, printable
from vpipe.model.layer import Layer
from vpipe.model.model import Model
from vpipe.runtime.stage_usage import StageUsage
from vpipe.runtime.step_results import Step

USAGES = [StageUsage(forward_s=0.4, backward_s=0.8, step_s=0.08, communication_s=0.008, idle_s=idle, bytes_sent=n,
                     versions=2, staleness=1, peak_activations=2, peak_memory_bytes=3.5e9)
          for idle, n in ((0.016, 8000), (0.16, 16_000_000))]
PLACEMENT = ((0,), (1,))
TABLE = [
    "",
    "stage  rank  layers  forward  backward  step  comm  idle",
    "    0     0     0-2     50.0     100.0  10.0   1.0   2.0",
    "    1     1     3-4     50.0     100.0  10.0   1.0  20.0",
    "",
    "stage  rank      sent  versions  staleness  in flight    memory",
    "    0     0    1000 B         2          1          2  3.26 GiB",
    "    1     1  1.91 MiB         2          1          2  3.26 GiB",
    "(forward to idle: milliseconds per update; idle: waiting for other ranks; sent: per",
    "  update; in flight: microbatches)"]


@pytest.fixture
def _a_quarter_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(module, "perf_counter", lambda: next(now) / 4)


def trained(worth: StepSize, updates: int = 8) -> Metrics:
    metrics = Metrics(None, worth)
    for i in range(updates):
        metrics.update(Step(i, 8.0 - i, 0.1, None, stop=False))
    metrics.evaluation(updates - 1, 2.0)
    return metrics


def test_a_line_of_a_sample_is_as_wide_as_shown() -> None:
    assert printable("中" * 60 + "\n\x1b[1mab\tc") == "中" * 50 + "\n [1mab  c"


@pytest.mark.usefixtures("_a_quarter_each")
def test_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "85")
    job = job_of(tmp_path, parallel__partition=[3, 2])
    efficiency = Efficiency((1e6, 1e6), 5e5, PeakFlops(0.01, 2, "fp32", "measured"))  # 3.072 of 20 GFLOP/s
    metrics = trained(StepSize(8, 128, efficiency))
    text = summary(job, metrics, RunFigures.from_metrics(metrics, USAGES, PLACEMENT), ["1 checkpoint"])
    assert [line.rstrip() for line in text.splitlines()] == [
        "8 updates in 2.0 s",
        "training loss 7.500 -> 1.500 (mean of the first 2, mean of the last 2)",
        "evaluation loss after 8 updates: 2.0000",
        "1 checkpoint",
        "",
        "samples/s  tokens/s  median     p95     MFU     HFU  bubble    memory      sent",
        "     32.0       512  250 ms  250 ms  15.4 %  16.6 %   6.1 %  3.26 GiB  1.91 MiB",
        "(bubble: share of time in which ranks wait for others; memory: peak of the fullest",
        "  process; sent: by all, per update)",
        "(without the first 2 updates; MFU, HFU: of 2 devices x 0.01 TFLOP/s fp32, measured)",
        *TABLE]
    job = job_of(tmp_path, parallel__schedule="pipedream", training__num_microbatches=None)
    lines = summary(job, metrics, RunFigures.from_metrics(metrics, USAGES, PLACEMENT)).splitlines()
    [table] = [lines[number:number + 3] for number, line in enumerate(lines) if "mean delay" in line][:1]
    end = table[0].index("mean delay") + len("mean delay")
    assert [line[:end].split()[-1] for line in table[1:]] == ["0.5", "0"]


@pytest.mark.usefixtures("_a_quarter_each")
def test_tables_fit_the_terminal_and_name_every_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, parallel__data_parallel_size=2)
    metrics = trained(StepSize(8, 128, Efficiency((1e6,), 0.0, PeakFlops(0.01, 2, "fp32", "measured"))))
    figures = RunFigures.from_metrics(metrics, [USAGES[0], *USAGES, USAGES[1]], job.schedule.placement)
    for columns, tables in ((40, 4), (60, 3), (80, 2), (100, 2), (140, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = summary(job, metrics, figures).splitlines()[3:]
        assert max(map(len, lines)) <= columns
        cells = [line.split() for line in lines]
        ranks = [tuple(row[:2]) for row in cells if row[:1] in (["0"], ["1"])]
        assert ranks == [("0", "0"), ("0", "1"), ("1", "2"), ("1", "3")] * tables
        heads = [word for row in cells if row[:2] == ["stage", "rank"] for word in row[2:]]
        assert " ".join(heads) == ("layers forward backward step comm idle sent versions staleness in flight memory")


def test_where_a_gpus_stream_waits_nobody_knows_the_bubble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    metrics, unknown = trained(StepSize(8, 128)), [replace(usage, idle_s=math.nan) for usage in USAGES]
    figures = RunFigures.from_metrics(metrics, unknown, PLACEMENT)
    assert figures is not None
    assert figures.bubble is figures.as_json()["stages"][0]["idle_s"] is None
    json.dumps(figures.as_json(), allow_nan=False)
    lines = summary(job_of(tmp_path), metrics, figures).splitlines()
    heads = ("MFU  HFU  bubble", "comm  idle")
    shown = [(line.index(head) + len(head), lines[number + 1]) for head in heads
             for number, line in enumerate(lines) if head in line]
    assert [row[:end].split()[-1] for end, row in shown] == ["-", "-"]
    worker = build_pipeline(job_of(tmp_path)).engine.workers[0]
    assert worker.usage(0).idle_s == 0.0
    monkeypatch.setattr(worker.transport, "ordered", True, raising=False)
    assert worker.usage(0).idle_s == 0.0  # a wait on the CPU is one of the host
    monkeypatch.setattr(worker.stages[0], "device", torch.device("cuda"))
    monkeypatch.setattr("vpipe.runtime.worker.peak_memory_bytes", lambda device: 0)
    assert math.isnan(worker.usage(0).idle_s)


def test_a_headline_says_what_is_not_usual(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__precision="bf16_pure", parallel__model_parallel_size=1, parallel__partition=[5],
                 parallel__schedule="gpipe", parallel__executor="naive", model__name="gpt", model__preset=None,
                 model__num_layers=2, model__num_heads=2, model__packed=True)
    assert headline(job) == ("gpt: 5 layers in 1 stage [5], schedule gpipe, executor naive, bf16_pure, packed, one "
                             "process per stage")


@pytest.mark.parametrize(("changes", "said"), [
    ({"parallel__schedule": "interleaved"}, "1 process of 2 stages (2 with parallel.model_parallel_size 4)"),
    ({"parallel__schedule": "interleaved", "parallel__chunks": 3, "parallel__model_parallel_size": 3},
     "1 process of 3 stages (3 with parallel.schedule 1f1b)"),
    ({"parallel__schedule": "interleaved", "parallel__model_parallel_size": 4}, "2 processes of 2 stages each"),
    ({"parallel__schedule": "chimera"}, "2 processes of 2 stages each"),
    ({"parallel__data_parallel_size": 2}, "4 processes")])
def test_a_headline_counts_the_processes(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert headline(job_of(tmp_path, **changes)).endswith(f", {said}")


@pytest.mark.parametrize(("training_loss", "held_out_loss", "updates", "samples", "alike", "by_heart"), [
    (1.9, 3.1, 60, 8, 0.6, True), (2.1, 3.1, 60, 8, 0.6, False), (1.9, 2.9, 60, 8, 0.6, False),
    (1.9, 3.1, 10, 64, 0.6, False),  # ten updates, though of ten passes
    (1.9, 3.1, 60, 3, 0.6, False),  # not three passes
    (1.9, 3.1, 60, 8, 0.4, False)])  # beside a text of another kind
def test_a_model_that_learned_its_text_by_heart(training_loss: float, held_out_loss: float, updates: int, samples: int,
                                                alike: float, by_heart: bool, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    job, metrics = job_of(tmp_path), Metrics(None, StepSize(samples, 128))
    monkeypatch.setattr(Job, "held_out_text", HeldOutText(100, 400, 3.0, alike))
    metrics.update(*(Step(number, training_loss, 0.1, None, stop=False) for number in range(updates)))
    metrics.evaluation(0, held_out_loss)
    said = summary(job, metrics, RunFigures.from_metrics(metrics, USAGES, PLACEMENT))
    assert ("\nit learned its data by heart: the training loss, 1.90, is far below that entropy; what helps is more "
            "data, else fewer steps, a smaller model, or a larger model.dropout or training.weight_decay\n"
            in said) is by_heart


def test_a_run_that_trained_nothing_says_so(tmp_path: Path) -> None:
    metrics = Metrics(None, StepSize(8, 128))
    metrics.update(*(Step(index, 4.0, 0.1, None, stop=False, skipped=True) for index in range(3)))
    job = job_of(tmp_path, training__precision="fp16", training__loss_scale=1e9)
    said = summary(job, metrics, RunFigures.from_metrics(metrics, USAGES, PLACEMENT)).splitlines()
    assert said[1:3] == ["3 of 3 updates were skipped: not finite", (
        "warning: nothing was trained, and the speed below is that of nothing; lower training.loss_scale, which is "
        "1e+09, or leave it out")]
    metrics.update(Step(3, 4.0, 0.1, None, stop=False))
    assert "nothing was trained" not in summary(job, metrics, RunFigures.from_metrics(metrics, USAGES, PLACEMENT))


@pytest.mark.usefixtures("_a_quarter_each")
def test_a_utilization_that_cannot_be_is_never_shown_without_a_warning(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    job = job_of(tmp_path, parallel__partition=[3, 2])
    metrics = trained(StepSize(8, 128, Efficiency((1e6, 1e6), 0.0, PeakFlops(0.001, 2, "fp32",
                                                                        "as metrics.peak_tflops says"))))
    lines = summary(job, metrics, RunFigures.from_metrics(metrics, USAGES, PLACEMENT)).splitlines()
    assert "  153.6 % (!)  153.6 % (!)" in lines[5]
    assert ("warning: the MFU of 154 % cannot be: the peak is wrong (2 devices x 0.001 TFLOP/s fp32, as "
                        "metrics.peak_tflops says); the devices reached 0.001536 TFLOP/s each, so set "
                        "metrics.peak_tflops to more than that") in lines


def test_the_summary_of_one_update_of_a_family_that_says_no_operations(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    metrics = Metrics(None, StepSize(8, 128))
    metrics.update(Step(0, 3.0, 0.1, None, stop=True))
    lines = summary(job, metrics, RunFigures.from_metrics(metrics, [StageUsage(*[0] * 10)] * 2, PLACEMENT)).splitlines()
    assert lines[:2] == ["1 update in 0.0 s", "training loss 3.000 -> 3.000 (the first, the last)"]
    assert lines[7] == "(no MFU: the family does not say what its layers compute)"


def test_what_is_in_flight_may_be_slices(tmp_path: Path) -> None:
    job, metrics = job_of(tmp_path, model__name="gpt", model__preset=None, model__num_layers=2, model__num_heads=2,
                          parallel__schedule="seq1f1b", parallel__slices=4), trained(StepSize(8, 128))
    text = summary(job, metrics, RunFigures.from_metrics(metrics, USAGES, PLACEMENT))
    assert " ".join(text.split()).endswith("update; in flight: slices, 4 a microbatch)")


def test_seconds_of_kinds_that_a_package_has_added_have_a_column(tmp_path: Path) -> None:
    metrics = trained(StepSize(8, 128))
    usages = [USAGES[0], replace(USAGES[1], others_s=0.04)]
    lines = summary(job_of(tmp_path), metrics, RunFigures.from_metrics(metrics, usages, PLACEMENT)).splitlines()
    at = lines.index("stage  rank  layers  forward  backward  step  comm  idle  other")
    assert lines[at + 1:at + 3] == ["    0     0     0-2     50.0     100.0  10.0   1.0   2.0      0",
                                    "    1     1     3-4     50.0     100.0  10.0   1.0  20.0    5.0"]


def test_it_has_every_rank_of_all_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two lanes, of which one takes longer and keeps less."""
    monkeypatch.setenv("COLUMNS", "160")
    job = job_of(tmp_path, parallel__tensor=2, parallel__zero1=True,
                 parallel__stage_to_rank_map={"0": [1], "1": [0, 2]})
    assert job.homes == ((2, 3), (0, 1, 4, 5))
    usages = [replace(USAGES[0], state_bytes=100 * n, forward_s=0.4 if n != 4 else 0.8, bytes_sent=1000 * n)
              for n in range(1, 7)]
    figures = RunFigures.from_metrics(trained(StepSize(8, 128)), usages, job.homes)
    assert (figures.ranks, figures.sent_bytes) == (6, 21_000 / 8)
    text = summary(job, trained(StepSize(8, 128)), figures)
    assert [line.split()[:2] for line in text.splitlines() if re.match(r" +\d +\d", line)] == [
        ["0", "2"], ["0", "3"], ["1", "0"], ["1", "1"], ["1", "4"], ["1", "5"]]
    assert " ".join(text.split()).endswith(
        "(2 lanes, of ranks 0, 2, 4 and 1, 3, 5: forward, backward and step include what layers exchange between "
        "lanes, and waiting for it; sent does not) (of stage 1 rank 1 takes 31 % longer than rank 0) (zero1: of the "
        "replicas rank 5 sends most, 750 B; rank 5 keeps most of an optimizer's state, 600 B of the 1000 B of stage "
        "1 in lane 1)")


def test_it_names_a_rank_that_works_clearly_longer_than_the_mean(tmp_path: Path) -> None:
    def said(job: Job, forward_s: float) -> str:
        metrics = trained(StepSize(8, 128))
        usages = [replace(USAGES[0], communication_s=9.0), replace(USAGES[1], forward_s=forward_s)]
        return " ".join(summary(job, metrics, RunFigures.from_metrics(metrics, usages, PLACEMENT)).split())

    named = "(rank 1 (stage 1) works 418 ms per update, 45 % more than the ranks on average"
    job = job_of(tmp_path)
    assert "more than the ranks" not in said(job, 0.4 + 0.46), "it has 2 layers, and one less is too little"
    assert said(job, 0.4 + 2.06).endswith(f"{named}; vpipe plan CONFIG finds a better partition)")
    assert said(job.with_plan(Plan(Cut((3, 2)))), 0.4 + 2.06).endswith(f"{named})")


def test_with_zero1_it_names_the_ranks_that_send_and_keep_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    job = job_of(tmp_path, parallel__zero1=True, parallel__stage_to_rank_map={"0": [0], "1": [1, 2]})
    assert job.update.zero1
    assert "GATHER_W" in job.schedule.kinds
    usages = [replace(USAGES[0], state_bytes=9000), replace(USAGES[1], state_bytes=700),
              replace(USAGES[0], state_bytes=800)]
    metrics = trained(StepSize(8, 128))
    lines = summary(job, metrics, RunFigures.from_metrics(metrics, usages, job.schedule.placement)).splitlines()
    assert " ".join(map(str.strip, lines[-2:])) == (
        "(zero1: of the replicas rank 1 sends most, 1.91 MiB; rank 2 keeps most of an optimizer's state, 800 B of the "
        "1.46 KiB of stage 1)")


def test_the_summary_of_no_update(tmp_path: Path) -> None:
    metrics = Metrics(None, StepSize(8, 128))
    assert RunFigures.from_metrics(metrics, USAGES, PLACEMENT) is None
    assert summary(job_of(tmp_path), metrics, None, ["no checkpoint"]) == "no checkpoint"


def made(monkeypatch: pytest.MonkeyPatch, seconds: list[float], past: PastMetrics | None = None,
         efficiency: Efficiency | None = None) -> Metrics:
    now = 10.0
    monkeypatch.setattr(module, "perf_counter", lambda: now)
    metrics = Metrics(None, StepSize(4, 64, efficiency), past, first=0 if past is None else len(past.losses))
    for index, took in enumerate(seconds):
        now += took
        metrics.update(Step(metrics.steps, 4.0 - index, 0.1, None, stop=False))
    return metrics


USAGE = replace(StageUsage(*[0] * 10), idle_s=1.0, bytes_sent=700, peak_memory_bytes=5, versions=1)


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
    past = PastMetrics(["..."] * 4, [8.0] * 4, [EvaluatedLoss(3, 7.5)], time_s=400.0)
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
    assert row["peak_is"] == "4 devices x 0.3333 TFLOP/s bf16, measured"
    config = load_config(write_config(tmp_path))
    [cells] = csv.DictReader(io.StringIO(csv_text([config_row(config) | row])))
    assert (cells["model.hidden_size"], cells["training.learning_rate"], cells["trace"]) == ("16", "0.01", "false")
    assert (cells["checkpoint.at_end"], cells["training.epochs"], cells["evaluation_loss"]) == ("false", "", "")
    assert (cells["mfu"], cells["peak_is"]) == ("7.2e-05", row["peak_is"])


def test_rows_of_other_columns_make_one_table() -> None:
    assert csv_text([{"a": 1, "b": [1, 2]}, {"a": None, "c": True}]) == 'a,b,c\n1,"[1, 2]",\n,,true\n'


def test_operations_of_the_layers_that_are_recomputed_count_for_hfu_only(tmp_path: Path) -> None:
    job = job_of(tmp_path, parallel__recompute=[0.0, 0.5])
    flops = model_flops(job.config.model, len(job.model))
    efficiency = Efficiency.of_pipe(build_pipeline(job), flops, 1e-6)
    assert flops is not None
    assert efficiency is not None
    assert efficiency.recompute_flops == flops[4]  # of the layers 3 and 4 of the second stage
    assert efficiency.peak == PeakFlops(1e-6, 1, "fp32", "as metrics.peak_tflops says")
    used = efficiency.utilization(1.0)
    assert used.model == pytest.approx(3 * sum(flops) / 1e6)
    assert used.hardware == pytest.approx((3 * sum(flops) + flops[4]) / 1e6)


def test_the_sizes_of_model_and_epoch(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    every = sum(p.numel() for layer in job.model.layers for p in layer.make().parameters())
    parameters = every - 32 * 16  # the words' table stands in the first layer and in the head
    samples, length = job.dataset.samples("train"), job.config.model.sequence_length
    vocabulary, updates = job.config.model.vocab_size, samples // job.config.dataset.batch_size
    assert size_lines(job) == (f"{parameters:,} parameters, vocabulary of {vocabulary:,}\n"
                               f"an epoch: {samples:,} samples, {samples * length:,} tokens, {updates} updates")
    stream = job_of(tmp_path, parallel__schedule="pipedream", parallel__data_parallel_size=3)
    assert size_lines(stream).endswith(f", about {updates * 4 // 3} updates"), "each of one microbatch of each replica"


class ReadsItsWeights(nn.Linear):
    """Cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.largest = self.weight.max().item()


def test_a_layer_that_needs_values_to_be_built_runs_all_the_same(tmp_path: Path) -> None:
    model = Model([Layer("reads", ReadsItsWeights, ("input_ids",), ("loss",))], ("input_ids",))
    assert size_lines(replace(job_of(tmp_path), model=model)).startswith("parameters unknown, vocabulary of 32\n")


def test_perplexity_of_a_model_of_next_tokens_alone(tmp_path: Path) -> None:
    assert evaluation_text(job_of(tmp_path), 1, 2.0) == "evaluation loss after 1 update: 2.0000"
    job = job_of(tmp_path, model__name="gpt", model__preset=None, model__num_layers=2, model__num_heads=2)
    assert evaluation_text(job, 8, 2.0) == "evaluation loss after 8 updates: 2.0000, perplexity 7.39"
    assert evaluation_text(job, 8, 1e4) == "evaluation loss after 8 updates: 10000.0000"
    assert evaluation_text(job, 8, math.nan) == "evaluation loss after 8 updates: nan"


def test_perplexity_stands_beside_the_training_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path, model__name="gpt", model__preset=None, model__num_layers=2, model__num_heads=2,
                 metrics__peak_tflops=1.0)
    train(job, tmp_path)
    shown = capsys.readouterr()
    pair = re.search(r"training loss ([\d.]+) -> ([\d.]+), perplexity ([\d.]+) -> ([\d.]+) \(", shown.out)
    assert pair is not None
    assert [float(pair[3]), float(pair[4])] == pytest.approx([math.exp(float(pair[i])) for i in (1, 2)], rel=0.01)
    line = re.search(r"update 4/4: loss ([\d.]+)  perplexity ([\d.]+)  ", shown.err)
    assert line is not None
    assert float(line[2]) == pytest.approx(math.exp(float(line[1])), rel=0.01)
