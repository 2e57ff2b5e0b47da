"""The record that a run leaves in its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import refusal
from small_run import job_of, losses
from torch import nn

from vpipe import Layer, Model, Pipeline
from vpipe.app.report.figures import Figures, step_ends
from vpipe.app.report.idle_causes import Producers
from vpipe.app.report.recording import read_recording
from vpipe.app.train.loop import train
from vpipe.app.train.trace_writer import TraceWriter
from vpipe.errors import RunError


def recorded_run(folder: Path, trace: bool, **changes: Any) -> None:
    """In this process; the small config with ``trace`` as it says."""
    folder.mkdir()
    job = job_of(folder, parallel__partition=[3, 2], **changes)
    train(replace(job, config=job.config.model_copy(update={"trace": trace})), folder)


def lines(file: Path) -> list[Any]:
    text = file.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_leaves_a_record_of_each_rank(tmp_path: Path) -> None:
    changes = {"training__evaluate_every": 2, "training__max_steps": 3, "parallel__recompute": [0.0, 1.0],
               "training__evaluation_batches": 1}
    recorded_run(tmp_path / "with", trace=True, **changes)
    recorded_run(tmp_path / "without", trace=False, **changes)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert not (tmp_path / "without" / "trace").exists()
    for rank in range(2):
        header, first, *rest, last = lines(tmp_path / "with" / "trace" / f"rank{rank}.jsonl")
        assert header.pop("host")
        weights, static = header.pop("weight_bytes"), header.pop("static_bytes")
        assert header == {
            "format": 1, "rank": rank, "clock_offset_s": 0.0, "placement": [[0], [1]], "schedule": "1f1b",
            "flush": True, "microbatches": 4, "update_every": 4, "partition": [3, 2], "recomputed": [[], [3, 4]],
            "samples_per_step": 8}
        assert list(weights) == list(static) == [str(rank)]
        assert static[str(rank)] > 2 * weights[str(rank)] > 0  # the optimizer's state was there when it was written
        assert first["clock"][1] == last["clock"][1] == 0.0
        assert first["clock"][0] <= rest[0][1] <= last["clock"][0]
        evaluations = [i for i, line in enumerate(rest) if isinstance(line, dict)]
        assert len(evaluations) == 2
        assert [line[0] for line in rest[evaluations[0] - 1::-1] if "STEP" in line[0]] == [f"{rank}STEP1",
                                                                                          f"{rank}STEP0"]
        assert evaluations[-1] == len(rest) - 1
        assert max(line[4] for line in rest if isinstance(line, list)) > 0
    recording = read_recording(tmp_path / "with")
    assert [len(track.actions) for track in recording.tracks] == [
        len(lines(tmp_path / "with" / "trace" / f"rank{rank}.jsonl")) - 5 for rank in range(2)]


class Failing(nn.Module):
    """Raises at a microbatch that is all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert bool(x.any()), "zeros"
        return self.linear(x)


class Mean(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.mean()


def pipeline() -> Pipeline:
    model = Model([Layer("first", Failing, ("x",), ("h",)), Layer("last", Mean, outputs=("loss",))], batch=("x",))
    return Pipeline(model, lambda own: torch.optim.SGD(own, 0.1), stages=2, schedule="1f1b", microbatches=2)


def test_a_run_that_fails_leaves_what_was_done_until_then(tmp_path: Path) -> None:
    pipe = pipeline()

    def run() -> None:
        with TraceWriter(tmp_path, pipe, 4) as trace:
            for step in pipe.train([{"x": torch.ones(4, 2)}, {"x": torch.zeros(4, 2)}]):
                trace.step(step.index + 1)

    with pytest.raises(RunError, match="zeros"):
        run()
    header, clock, *actions = lines(tmp_path / "trace" / "rank0.jsonl")
    assert (header["rank"], list(clock)) == (0, ["clock"])
    assert [action[0] for action in actions if action[0][1] in "FB"] == ["0F0", "0F1", "0B0", "0B1"]
    assert read_recording(tmp_path).tracks[1].actions


def test_a_record_has_a_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO", logger="vpipe")
    pipe = pipeline()
    monkeypatch.setattr(pipe, "record", partial(pipe.record, 12))
    with TraceWriter(tmp_path, pipe, 4) as trace:
        for step in pipe.train([{"x": torch.ones(4, 2)}] * 4):
            trace.step(step.index + 1)
        trace.end()
    for rank in range(2):
        *_, clock, end = content = lines(tmp_path / "trace" / f"rank{rank}.jsonl")
        assert (len(content), list(clock), end) == (1 + 1 + 12 + 1 + 1, ["clock"], {"truncated": True})
    assert [record.message for record in caplog.records if "timeline" in record.message] == [
        f"the timeline of rank {rank} ends here: it holds 12 actions, the most that are recorded" for rank in range(2)]


@pytest.mark.parametrize(("at_once", "after_s", "written"), [
    (15, 1e9, [1, 1, 3, 3, 5]), (10**6, -1.0, [1, 2, 3, 4, 5]), (10**6, 1e9, [1] * 5)])
def test_many_notes_or_old_ones_are_written_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          at_once: int, after_s: float, written: list[int]) -> None:
    monkeypatch.setattr("vpipe.app.train.trace_writer.AT_ONCE", at_once)
    monkeypatch.setattr("vpipe.app.train.trace_writer.AFTER_S", after_s)
    pipe, file, sizes = pipeline(), tmp_path / "trace" / "rank0.jsonl", []
    with TraceWriter(tmp_path, pipe, 4) as trace:
        for step in pipe.train([{"x": torch.ones(4, 2)}] * 5):
            trace.step(step.index + 1)
            sizes.append(len(lines(file)))
    per_step = 9  # two forwards and backwards, two sends, two receives, a step
    assert sizes == [2 + per_step * steps for steps in written]


def test_a_record_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    assert refusal(TraceWriter, tmp_path, pipeline(), 4) == (
        f"error: cannot write the timeline of the run in '{tmp_path / 'trace'}': File exists\n"
        "hint: make room there, or set trace to false")


@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "pipedream_vertical_sync"])
def test_staleness_is_what_the_run_counted(tmp_path: Path, schedule: str) -> None:
    """Also behind an evaluation, before which the pipeline empties."""
    layers = [Layer(f"layer{i}", Failing, ("x",) if i == 0 else ("h",), ("h",)) for i in range(3)]
    pipe = Pipeline(Model([*layers, Layer("last", Mean, outputs=("loss",))], batch=("x",)),
                    lambda own: torch.optim.SGD(own, 0.1), stages=3, schedule=schedule, microbatches=4)
    data = [{"x": torch.ones(4, 2)}] * 6
    with TraceWriter(tmp_path, pipe, 4) as trace:
        for part in range(2):
            for step in pipe.train(data):
                trace.step(step.index + 1)
            if part == 0:
                pipe.evaluate(data[:1])
    recording = read_recording(tmp_path)
    figures = Figures.from_recording(recording, Producers.from_recording(recording))
    assert [stage.staleness for stage in figures.stages] == [
        stage.staleness for stage in pipe.engine.collectives.usage()]


@pytest.mark.parametrize("at", [0, 1])
def test_a_full_disk_ends_the_record_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("vpipe.app.train.trace_writer.AT_ONCE", 1)
    pipe, losses = pipeline(), list[float]()
    with Path("/dev/full").open("w", encoding="utf-8") as full, TraceWriter(tmp_path, pipe, 4) as trace:
        for step in pipe.train([{"x": torch.ones(4, 2)}] * 4):
            if step.index == at:
                trace._files[0].close()
                trace._files[0] = full
            trace.step(step.index + 1)
            losses.append(step.loss)
        trace.end()
    assert len(losses) == 4
    (said,) = [record.message for record in caplog.records if "timeline" in record.message]
    assert said == ("the timeline of rank 0 breaks off, training continues: cannot write /dev/full: No space left on "
                    "device")
    assert pipe.engine._recorders[0].waiting == 0
    assert list(lines(tmp_path / "trace" / "rank1.jsonl")[-1]) == ["clock"]
    if at == 1:
        recording = read_recording(tmp_path)
        assert [track.broken_off for track in recording.tracks] == [True, False]
        assert step_ends(recording).keys() == {0}
