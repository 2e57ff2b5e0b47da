"""Whether a run says that its ranks work unequally long: what it compares, when, and what it says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small_run import job_of
from torch import Tensor, nn

from vpipe.model.layer import Layer, Model
from vpipe.plan.memory import StageMemory
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import Prediction, StagePrediction
from vpipe.train.job import Job
from vpipe.train.loop import build
from vpipe.train.replan import Compared, Replanning, said


class Slow(nn.Module):
    """A layer that takes ``seconds`` for a forward of its identity."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight.detach()))

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return hidden * self.scale.sum()


class First(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.float()


class Last(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean()


def sleeping_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], **changes: Any) -> Job:
    """Six layers: four that sleep, between two that do nothing."""
    model = Model([Layer("first", First, ("input_ids",), ("h",)),
                   *(Layer(f"slow{i}", lambda s=s: Slow(s)) for i, s in enumerate(seconds)),
                   Layer("last", Last, ("h",), ("loss",))], batch=("input_ids",))
    monkeypatch.setattr("vpipe.train.job.model_named", lambda name: lambda settings: model)
    return job_of(tmp_path, **{"parallel__partition": [3, 3], "training__num_microbatches": 2, **changes})


def lines_of(job: Job, folder: Path, steps: int, interrupted_at: int | None = None) -> list[str]:
    """What is said while a job makes so many steps in this process; one step warms up, two are measured."""
    lines: list[str] = []
    pipe = build(job)
    balance = Replanning(job, pipe, folder, lines.append, warm_up=1, measured=2)
    for step in pipe.engine.train(job.training_batches(tuple(job.model.batch)), steps):
        if step.index == interrupted_at:
            balance.interrupted()
        balance.step()
    balance.end()
    return lines


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_stage_that_takes_longer_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 schedule: str) -> None:
    job = sleeping_job(tmp_path, monkeypatch, (0, 0, 0.015, 0.015), parallel__schedule=schedule)
    [line] = lines_of(job, tmp_path, 9)
    assert line.startswith("out of balance: rank 1 (stage 1) works ")
    assert line.endswith(" % more than the ranks on average; vpipe plan CONFIG finds a better partition")


def test_stages_that_take_equally_long_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(sleeping_job(tmp_path, monkeypatch, (0.01, 0.03, 0.03, 0.01)), tmp_path, 5) == []


def test_a_run_too_short_to_be_measured_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(sleeping_job(tmp_path, monkeypatch, (0, 0, 0, 0.01)), tmp_path, 2) == []


@pytest.mark.parametrize(("schedule", "said_lines"), [("1f1b", 1), ("pipedream", 0)])
def test_what_was_measured_while_a_stream_ran_dry_does_not_count(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, said_lines: int) -> None:
    job = sleeping_job(tmp_path, monkeypatch, (0, 0, 0, 0.02), parallel__schedule=schedule,
                       parallel__update_every=None if schedule == "1f1b" else 2)
    assert len(lines_of(job, tmp_path, 4, interrupted_at=2)) == said_lines


def test_a_single_rank_has_nobody_to_be_compared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = sleeping_job(tmp_path, monkeypatch, (0, 0, 0, 0), parallel__model_parallel_size=1, parallel__partition=[6])
    assert lines_of(job, tmp_path, 5) == []


PREDICTION = Prediction(0.03, 8, 0.0, tuple(
    StagePrediction(first, layers, (rank,), 0.002, 0.004, 0.001, 0.0, 0.0, 0.0, StageMemory(0, 0, 0, 0, 0, 0))
    for rank, (first, layers) in enumerate([(0, 3), (3, 2)])))


@pytest.mark.parametrize(("answer", "remedy"), [
    (((2, 3), 0.12), "the partition [2, 3] in place of [3, 2] is expected to save 12 % of the slowest stage's time "
                     "(set parallel.partition)"),
    (((3, 2), 0.0), "no other partition than [3, 2] is expected to be faster")])
def test_with_a_profile_the_better_partition_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any,
                                                      remedy: str) -> None:
    asked: list[Any] = []

    def better(profile: Any, *arguments: Any) -> Any:
        asked.append(arguments)
        return answer

    monkeypatch.setattr("vpipe.plan.solve.better_partition", better)
    job = job_of(tmp_path).planned(Plan((3, 2), predictions=PREDICTION))

    class OfFive:
        layers = (None,) * 5

    compared = Compared((0.04, 0.02), (0.009, 0.004))
    assert said(compared, job, OfFive) == (  # type: ignore[arg-type]
        "out of balance: rank 0 (stage 0) works 40.0 ms per update, 33 % more than the ranks on average (9.0 ms per "
        f"microbatch, planned were 7.0); {remedy}")
    assert asked == [((3, 2), (frozenset(), frozenset()), ((0,), (1,)), (0.009, 0.004))]


def test_fifteen_percent_are_allowed(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert said(Compared((1.14, 0.86), (0.1, 0.1)), job, lambda: None) is None
    assert said(Compared((1.16, 0.84), (0.1, 0.1)), job, lambda: None) is not None
