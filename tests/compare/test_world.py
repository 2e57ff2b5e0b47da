"""A comparison in one process: that contenders do not disturb each other, what is written, who is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import job_of, oracle

from vpipe.compare import world
from vpipe.compare.entry import Entry, Field
from vpipe.compare.plain import of_schedules
from vpipe.compare.world import compare
from vpipe.errors import Problem, UserError
from vpipe.plan.plan import Plan
from vpipe.train.job import Job


def compared(job: Job, folder: Path, field: Field) -> dict[str, Any]:
    compare(job, folder, lambda world: field)
    return json.loads((folder / "comparison.json").read_text())


def test_every_contender_trains_as_if_it_were_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path, training__max_steps=5, training__grad_clip=0.5)
    found = compared(job, tmp_path, of_schedules(job, ("1f1b", "pipedream", "interleaved")))
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
    stream, other = of_schedules(job, ("pipedream", "1f1b")).entries
    entries = (stream, other, replace(stream, name="vpipe", words="planned", largest_size=2))
    found = compared(job, tmp_path, Field(entries, {}, None))
    first, _, twin = found["outcomes"]
    assert [outcome["same_as"] for outcome in found["outcomes"]] == [None, None, "pipedream"]
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
    jobs = [job.planned(entry.plan) for entry in of_schedules(job, ("1f1b", "gpipe", "pipedream")).entries]
    assert jobs[0].same_program(jobs[1])
    assert not jobs[0].same_program(jobs[2])  # which has no flush
    four = job_of(tmp_path)
    jobs = [four.planned(entry.plan) for entry in of_schedules(four, ("1f1b", "gpipe")).entries]
    assert not jobs[0].same_program(jobs[1])


def test_memory_is_counted_for_each(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=2, parallel__partition=[3, 2])
    most = {outcome["name"]: outcome["kept_bytes"] for outcome in
            compared(job, tmp_path, of_schedules(job, ("gpipe", "1f1b", "pipedream")))["outcomes"]}
    parameters = sum(p.numel() for layer in job.model.layers[:3] for p in layer.build().parameters())
    assert most["1f1b"][0] > 16 * parameters  # weights, gradients, two moments, and activations
    assert most["gpipe"][0] > most["1f1b"][0]  # all four microbatches at once, not two
    assert most["gpipe"][1] > most["1f1b"][1]
    assert most["pipedream"][0] == most["1f1b"][0] + 4 * parameters  # one more version of the weights


def test_minutes_end_every_contender(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=10_000, training__max_minutes=1e-6)
    found = compared(job, tmp_path, of_schedules(job, ("1f1b", "pipedream")))
    made = {outcome["name"]: len(outcome["losses"]) for outcome in found["outcomes"]}
    assert made["1f1b"] == 3  # two to warm up; the next one finds the time used up
    assert 2 < made["pipedream"] < 9


def test_one_that_does_not_fit_the_config_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=1, parallel__model_parallel_size=4)
    found = compared(job, tmp_path, of_schedules(job, ("1f1b", "interleaved")))
    assert [outcome["name"] for outcome in found["outcomes"]] == ["1f1b"]
    assert "8 stages" in found["refused"]["interleaved"]
    assert [row["failed"] == found["refused"].get(row["contender"], "") for row in
            csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines())] == [True, True]


def test_nobody_can_take_part(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    field = Field((Entry("vpipe", "planned", Plan((3, 3))),),
                  {"gpipe": Problem("stage 0 needs 9 GiB", "buy more")}, 1000)
    with pytest.raises(UserError) as refused:
        compare(job, tmp_path, lambda world: field)
    assert "nobody can take part: gpipe: stage 0 needs 9 GiB\nhint: buy more" in str(refused.value)
    assert "vpipe: " in str(refused.value)
    assert Field.of_json(json.loads(json.dumps(field.as_json()))).entries[0].plan.partition == (3, 3)


def test_replicas_run_as_the_config_has_them(tmp_path: Path) -> None:
    job = job_of(tmp_path, parallel__data_parallel_size=2)
    field = of_schedules(job, ("1f1b", "pipedream", "interleaved"))
    assert {entry.name: entry.plan.stage_to_rank_map for entry in field.entries} == dict.fromkeys(
        ("1f1b", "pipedream"), ((0, 1), (2, 3)))
    assert [job.planned(entry.plan).samples_per_update for entry in field.entries] == [8, 8]
    assert field.refused["interleaved"].what == ("'interleaved' holds 2 stages on a rank, but the config has replicas "
                                                 "of stages")


def test_nobody_makes_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path)
    monkeypatch.setattr(world, "_losses", lambda *args: iter(()))
    with pytest.raises(UserError, match="nobody made an update"):
        compare(job, tmp_path, lambda world: of_schedules(job, ("1f1b", "gpipe")))
