"""Compare in one process: contenders do not disturb each other, files are written, misfits are refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import job_of, oracle

from vpipe import Cut
from vpipe.app.train.job import Job
from vpipe.errors import Problem, UserError
from vpipe.extras.comparison.planning import Contender, plan_contenders
from vpipe.extras.comparison.run import ContenderRun, compare
from vpipe.extras.comparison.systems import ComparisonRequest
from vpipe.plan.plan import Plan
from vpipe.profiling.rank_group import RankGroup

pytestmark = pytest.mark.jobs


def plan(jobs: Mapping[str, Job], request: ComparisonRequest) -> list[Contender]:
    return plan_contenders(jobs, request, RankGroup(torch.device("cpu")), [].append)


def of_schedules(job: Job, *names: str) -> list[Contender]:
    return plan({"": job}, ComparisonRequest(schedules=names))


def compared(job: Job, folder: Path, contenders: Sequence[Contender]) -> dict[str, Any]:
    compare({"": job}, folder, lambda world: list(contenders))
    return json.loads((folder / "comparison.json").read_text())


def test_every_contender_trains_as_if_it_were_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path, training__max_steps=5, training__grad_clip=0.5)
    found = compared(job, tmp_path, of_schedules(job, "1f1b", "pipedream", "interleaved"))
    losses = {outcome["name"]: outcome["losses"] for outcome in found["outcomes"]}
    assert losses["1f1b"] == losses["interleaved"] == oracle(job, 5).losses[:5]
    alone = job_of(tmp_path, training__max_steps=5, training__grad_clip=0.5, parallel__schedule="pipedream",
                   parallel__update_every=4, parallel__partition=list(job.partition))
    assert losses["pipedream"] == oracle(alone, 5).losses[:5]
    shapes = {outcome["name"]: (outcome["microbatches"], outcome["microbatch_size"]) for outcome in found["outcomes"]}
    assert shapes == dict.fromkeys(losses, (4, 2))
    assert found["equal_updates"] == 5
    said = capsys.readouterr()
    assert "1f1b: 5/5 updates" in said.err
    assert "2 stages on each rank, balanced by parameters" in said.out
    assert (tmp_path / "comparison.svg").read_text().startswith("<svg")
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [(row["contender"], row["parallel.schedule"], row["steps"]) for row in rows] == [
        (name, name, "5") for name in losses]
    assert json.loads(rows[2]["parallel.partition"]) == [1, 1, 1, 2]
    for row, outcome in zip(rows, found["outcomes"], strict=True):
        assert float(row["samples_per_s"]) == outcome["samples_per_s"]
        assert float(row["held_bytes"]) == outcome["peak_bytes"]
        assert 0 < float(row["mfu"]) == float(row["hfu"]) < 1  # nothing is recomputed


def test_the_same_program_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path, training__max_steps=3)
    stream, flush = of_schedules(job, "pipedream", "1f1b")
    found = compared(job, tmp_path, [
        stream, flush, replace(stream, name="vpipe", description="planned", largest_size=2)])
    assert found["memory_bytes"] is None
    first, other, twin = found["outcomes"]
    assert [outcome["same_as"] for outcome in found["outcomes"]] == [None, None, "pipedream"]
    assert first["peak_bytes"] > other["peak_bytes"]  # by another version of the weights
    assert twin == {**first, "name": "vpipe", "words": "planned", "largest_size": 2, "same_as": "pipedream"}
    said = capsys.readouterr()
    assert "pipedream: 3/3" in said.err
    assert "vpipe: 3/3" not in said.err
    assert "(=) the same program as pipedream, which ran for both" in said.out
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [(row["contender"], row["same_as"]) for row in rows] == [("pipedream", ""), ("1f1b", ""),
                                                                     ("vpipe", "pipedream")]
    assert rows[0]["samples_per_s"] == rows[2]["samples_per_s"] != rows[1]["samples_per_s"]


def test_schedules_that_order_one_microbatch_alike_are_the_same_program(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__num_microbatches=1)
    jobs = [job.with_plan(entry.plan) for entry in of_schedules(job, "1f1b", "gpipe", "pipedream")]
    assert jobs[0].same_program(jobs[1])
    assert not jobs[0].same_program(jobs[2])  # which has no flush
    four = job_of(tmp_path)
    jobs = [four.with_plan(entry.plan) for entry in of_schedules(four, "1f1b", "gpipe")]
    assert not jobs[0].same_program(jobs[1])


def test_memory_is_counted_for_each(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=2, parallel__partition=[3, 2])
    most = {outcome["name"]: outcome["kept_bytes"] for outcome in
            compared(job, tmp_path, of_schedules(job, "gpipe", "1f1b", "pipedream"))["outcomes"]}
    parameters = sum(p.numel() for layer in job.model.layers[:3] for p in layer.build().parameters())
    assert most["1f1b"][0] > 16 * parameters  # weights, gradients, two moments, and activations
    assert most["gpipe"][0] > most["1f1b"][0]  # all four microbatches at once, not two
    assert most["gpipe"][1] > most["1f1b"][1]
    assert most["pipedream"][0] == most["1f1b"][0] + 4 * parameters  # one more version of the weights


def test_minutes_end_every_contender(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=10_000, training__max_minutes=1e-6)
    found = compared(job, tmp_path, of_schedules(job, "1f1b", "pipedream"))
    made = {outcome["name"]: len(outcome["losses"]) for outcome in found["outcomes"]}
    assert made["1f1b"] == 3  # two to warm up; the next one finds the time used up
    assert 2 < made["pipedream"] < 9


def test_one_that_does_not_fit_the_config_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=1, parallel__model_parallel_size=4)
    fits, misfit = of_schedules(job, "1f1b", "interleaved")
    found = compared(job, tmp_path, [replace(fits, memory_bytes=1 << 30), misfit])
    assert found["memory_bytes"] == 1 << 30
    assert [outcome["name"] for outcome in found["outcomes"]] == ["1f1b"]
    assert "8 stages" in found["refused"]["interleaved"]
    assert [row["failed"] == found["refused"].get(row["contender"], "") for row in
            csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines())] == [True, True]


def test_nobody_can_take_part(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    contenders = [Contender("vpipe", "", plan=Plan(Cut((3, 3)))),
                  Contender("gpipe", "", problem=Problem("stage 0 needs 9 GiB", "buy more"))]
    with pytest.raises(UserError) as refused:
        compare({"": job}, tmp_path, lambda world: contenders)
    assert "no contender can take part: gpipe: stage 0 needs 9 GiB\nhint: buy more" in str(refused.value)
    assert "vpipe: " in str(refused.value)


def test_replicas_run_as_the_config_has_them(tmp_path: Path) -> None:
    job = job_of(tmp_path, parallel__data_parallel_size=2)
    *others, interleaved = of_schedules(job, "1f1b", "pipedream", "interleaved")
    plans = [one.plan for one in others if one.plan]
    assert [plan.groups for plan in plans] == [((0, 1), (2, 3))] * 2
    assert [job.with_plan(plan).samples_per_update for plan in plans] == [8, 8]
    assert interleaved.problem is not None
    assert interleaved.problem.what == "'interleaved' holds 2 stages on a rank, but the config has replicas of stages"


def test_nobody_makes_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path)
    monkeypatch.setattr(ContenderRun, "_train", lambda self: iter(()))
    with pytest.raises(UserError, match="no contender made an update"):
        compared(job, tmp_path, of_schedules(job, "1f1b", "gpipe"))


def test_several_models_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = job_of(tmp_path, training__max_steps=4)
    large = job_of(tmp_path, training__max_steps=3, model__num_layers=3, parallel__schedule="gpipe")
    jobs = {"small": small, "again": small, "large": large}
    compare(jobs, tmp_path, lambda world: plan(jobs, ComparisonRequest()))
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [(one["name"], one["model"], one["schedule"], one["same_as"]) for one in found["outcomes"]] == [
        ("small", "small", "1f1b", None), ("again", "again", "1f1b", "small"), ("large", "large", "gpipe", None)]
    assert found["outcomes"][0]["losses"] == oracle(small, 4).losses[:4]
    assert found["outcomes"][2]["losses"] == oracle(large, 3).losses[:3]
    assert found["title"] == "; ".join(
        f"bert: {layers} layers on 2 ranks, 8 samples per update" for layers in (5, 7))
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [(row["model"], row["schedule"], row["model.num_layers"]) for row in rows] == [
        ("small", "1f1b", ""), ("again", "1f1b", ""), ("large", "gpipe", "3")]
    assert float(rows[0]["mfu"]) != float(rows[2]["mfu"])
    assert "large: as its config says" in capsys.readouterr().out


def test_models_are_crossed_with_schedules_and_equal_layouts_of_two_models_both_run(tmp_path: Path) -> None:
    jobs = {"wide": job_of(tmp_path, model__hidden_size=32), "narrow": job_of(tmp_path, training__num_microbatches=1)}
    contenders = plan(jobs, ComparisonRequest(schedules=("1f1b", "gpipe")))
    assert [one.name for one in contenders] == ["wide 1f1b", "wide gpipe", "narrow 1f1b", "narrow gpipe"]
    compare(jobs, tmp_path, lambda world: contenders)
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [one["same_as"] for one in found["outcomes"]] == [None, None, None, "narrow 1f1b"]
    assert [one["schedule"] for one in found["outcomes"]] == ["1f1b", "gpipe"] * 2


def test_auto_is_planned_for_the_measured_layers(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=1, parallel__partition="auto", dataset__cache_directory=str(tmp_path))
    [own] = plan({"": job}, ComparisonRequest())
    auto, plain = of_schedules(job, "auto", "1f1b")
    for planned in (own, auto):
        assert planned.description == "planned for the measured layers"
        assert planned.plan is not None
        assert planned.plan.predictions is not None
        assert job.with_plan(planned.plan).samples_per_update == 8
    assert plain.plan is not None
    assert plain.plan.predictions is None
    found = compared(job, tmp_path, [auto])
    assert found["outcomes"][0]["predicted_bytes"] > 0
