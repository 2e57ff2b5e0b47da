"""Whether a run says that its ranks work unequally long: what it compares, when, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from small_run import job_of, put_in
from torch import Tensor, nn

from vpipe import Cut
from vpipe.app.train import load_balance
from vpipe.app.train.job import Job
from vpipe.app.train.load_balance import BalanceCheck, RankWork, warning
from vpipe.app.train.loop import build_pipeline
from vpipe.app.train.metrics import Metrics, StepSize
from vpipe.app.train.observers import Run
from vpipe.model.layer import Layer
from vpipe.model.model import Model
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.profile import Profile
from vpipe.plan.stage_costs import StageMemory
from vpipe.runtime import worker


class Clock:
    """Of all ranks, which take turns: it goes on when it is looked at, and in slow layers."""

    now_s = 0.0

    def look(self) -> float:
        self.now_s += 1e-6
        return self.now_s


CLOCK = Clock()


class Slow(nn.Module):
    """A layer that takes ``seconds`` of the clock for a forward of its identity."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight.detach()))

    def forward(self, hidden: Tensor) -> Tensor:
        CLOCK.now_s += self.seconds
        return hidden * self.scale.sum()


class First(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.float()


class Last(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean()


def slow_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], **changes: Any) -> Job:
    """Six layers: four that are slow, between two that do nothing."""
    model = Model([Layer("first", First, ("input_ids",), ("h",)),
                   *(Layer(f"slow{i}", lambda s=s: Slow(s)) for i, s in enumerate(seconds)),
                   Layer("last", Last, ("h",), ("loss",))], batch=("input_ids",))
    put_in(monkeypatch, model)
    return job_of(tmp_path, **{"parallel__partition": [3, 3], "training__num_microbatches": 2, **changes})


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step warms up, two are measured, by a clock of the test's own."""
    monkeypatch.setattr(worker, "perf_counter", CLOCK.look)
    monkeypatch.setattr(load_balance, "WARM_UP", 1)
    monkeypatch.setattr(load_balance, "MEASURED", 2)


def lines_of(job: Job, folder: Path, steps: int, emptied_after: Sequence[int] = ()) -> list[str]:
    """What is said while a job makes so many steps in this process."""
    lines: list[str] = []
    pipe = build_pipeline(job)
    balance = BalanceCheck(Run(job, pipe, folder, Metrics(None, StepSize(1, 1)), lines.append))
    done = 0
    for step in pipe.train(job.training_batches(tuple(job.model.batch)), updates=steps):
        balance.step(done := max(done, step.index + 1))
        if step.index in emptied_after:
            balance.drain()
            balance.step(done := done + len(list(pipe.drain())))
            balance.pause()
            balance.resume()
    balance.end()
    return lines


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_stage_that_takes_longer_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 schedule: str) -> None:
    job = slow_job(tmp_path, monkeypatch, (0, 0, 0.015, 0.015), parallel__schedule=schedule)
    [line] = lines_of(job, tmp_path, 9)
    assert line.startswith("out of balance: rank 1 (stage 1) works ")
    assert line.endswith(" % more than the ranks on average; vpipe plan CONFIG finds a better partition")


def test_stages_that_take_equally_long_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(slow_job(tmp_path, monkeypatch, (0.01, 0.03, 0.03, 0.01)), tmp_path, 5) == []


def test_a_run_too_short_to_be_measured_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(slow_job(tmp_path, monkeypatch, (0, 0, 0, 0.01)), tmp_path, 2) == []


@pytest.mark.parametrize(("schedule", "emptied_after", "said_lines"), [
    ("1f1b", [0], 1), ("pipedream", [1], 0), ("pipedream", [0, 2, 4], 1)])
def test_a_stream_that_is_emptied_now_and_then_is_measured_in_between(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, emptied_after: list[int],
        said_lines: int) -> None:
    job = slow_job(tmp_path, monkeypatch, (0, 0, 0, 0.02), parallel__schedule=schedule,
                   parallel__update_every=None if schedule == "1f1b" else 2)
    assert len(lines_of(job, tmp_path, 3 if len(emptied_after) == 1 else 9, emptied_after)) == said_lines


def test_a_single_rank_has_nobody_to_be_compared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = slow_job(tmp_path, monkeypatch, (0, 0, 0, 0), parallel__model_parallel_size=1, parallel__partition=[6])
    assert lines_of(job, tmp_path, 5) == []


PREDICTION = Prediction(0.03, 8, 0.0, tuple(
    StagePrediction(first, layers, (rank,), 0.002, 0.004, 0.001, 0.0, 0.0, 0.0, StageMemory(0, 0, 0, 0, 0, 0))
    for rank, (first, layers) in enumerate([(0, 3), (3, 2)])))
PLAN = Plan(Cut((3, 2)), predictions=PREDICTION)


def of_five(weights: int = 0, saved: int = 0) -> Profile:
    """Five layers of 1 ms forward and 2 ms backward; the last has the weights, all keep ``saved`` bytes."""
    made = made_profile(5, 2, 2, forward_ms=[2.0] * 5, saved=2 * saved)
    return replace(made, layers=tuple(replace(layer, parameter_bytes=weights if number == 4 else 0, optimizer_bytes=0,
                                              working_bytes=0) for number, layer in enumerate(made.layers)))


def test_with_a_profile_the_better_partition_is_named(tmp_path: Path) -> None:
    job = job_of(tmp_path).with_plan(PLAN)
    start = ("out of balance: rank 0 (stage 0) works 40.0 ms per update, 33 % more than the ranks on average (9.0 ms "
             "per microbatch, planned were 7.0); ")
    uneven = RankWork((0.04, 0.02), (0.009, 0.004))
    for from_file in (False, True):
        line = warning(uneven, job, of_five, PLAN, from_file=from_file)
        assert line is not None
        assert line.startswith(f"{start}the partition [2, 3] in place of [3, 2] is expected to save ")
        assert line.endswith(" % of a step (set parallel.partition" + (", and leave parallel.plan out)" if from_file
                                                                       else ")"))


def test_partitions_that_do_not_fit_are_not_advised(tmp_path: Path) -> None:
    job = job_of(tmp_path, parallel__memory="24MiB").with_plan(PLAN)
    line = warning(RankWork((0.04, 0.02), (0.009, 0.004)), job, lambda: of_five(8 << 20, 3 << 20), PLAN)
    assert line is not None
    assert "no other partition than [3, 2] is expected to be faster in 24 MiB per rank; [2, 3] would save " in line


def test_a_run_that_is_as_uneven_as_its_plan_says_nothing(tmp_path: Path) -> None:
    uneven = replace(PREDICTION, stages=(replace(PREDICTION.stages[0], forward_s=0.016), PREDICTION.stages[1]))
    job, compared = job_of(tmp_path), RankWork((0.084, 0.028), (0.02, 0.007))
    assert warning(compared, job, lambda: None, replace(PLAN, predictions=uneven)) is None
    assert warning(compared, job, lambda: None, PLAN) is not None
    assert warning(compared, job, lambda: None, replace(PLAN, cut=Cut((2, 3)), predictions=uneven)) is not None


def test_the_plan_that_the_launcher_left_is_the_run_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = slow_job(tmp_path, monkeypatch, (0, 0, 0, 0.01))
    Plan(Cut((3, 3)), predictions=replace(PREDICTION, stages=(PREDICTION.stages[0], PREDICTION.stages[0]))).save(
        tmp_path / "plan.json")
    [line] = lines_of(job, tmp_path, 5)
    assert "planned were 7.0)" in line


def test_fifteen_percent_are_allowed(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert warning(RankWork((1.14, 0.86), (0.1, 0.1)), job, lambda: None) is None
    assert warning(RankWork((1.16, 0.84), (0.1, 0.1)), job, lambda: None) is not None
