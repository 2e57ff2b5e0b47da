"""What a script records of its training, beside what ``vpipe train`` records of the same."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from itertools import count
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import job_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from vpipe import Asynchronous, Model, Pipeline, Update
from vpipe.app import RecordedRun
from vpipe.app.cli import main
from vpipe.app.train.loop import build_pipeline, train
from vpipe.app.train.model_section import model_flops
from vpipe.errors import UserError

MEASURED = {"memory_bytes", "forward_s", "backward_s", "step_s", "communication_s", "peak_memory_bytes"}


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def pipeline(schedule: Any = "1f1b", average: float | None = None) -> Pipeline:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    update = Update(lambda p: torch.optim.SGD(p, lr=0.1), average=average)
    return Pipeline(Model.sequential(net, nn.CrossEntropyLoss()), update, stages=2, schedule=schedule, microbatches=4)


def batches(number: int = 100) -> Iterator[dict[str, Tensor]]:
    for seed in range(number):
        random = torch.Generator().manual_seed(seed)
        yield {"input": torch.randn(8, 3, generator=random), "target": torch.randint(2, (8,), generator=random)}


def test_a_script_records_what_vpipe_train_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that passes a second at each look, all lines and all figures that nobody measures are equal."""
    job = job_of(tmp_path, training__max_steps=6, training__evaluate_every=3, training__grad_clip=1.0,
                 training__evaluation_batches=1, parallel__recompute=[0.0, 1.0])
    monkeypatch.setattr("vpipe.app.train.metrics.perf_counter", count().__next__)
    (tmp_path / "command").mkdir()
    train(job, tmp_path / "command")
    pipe = build_pipeline(job)
    fields = [name for stage in pipe.stages for name in stage.fields]
    with RecordedRun(pipe, tmp_path / "script", updates=6, tokens_per_sample=job.config.model.sequence_length,
                     flops=model_flops(job.config.model, len(job.model)), peak_tflops=1.0) as run:
        for step in run.train(job.training_batches(fields)):
            if step.index in (2, 5):
                run.evaluate(job.evaluation_batches(fields))
        figures = run.figures()
    expected, found = lines(tmp_path / "command"), lines(tmp_path / "script")
    of_run, of_script = (each.pop()["summary"] for each in (expected, found))
    assert found == expected
    assert figures is not None
    assert of_run["bubble"] is of_script["bubble"] is figures.bubble is None, "both ranks take turns in this process"
    assert figures.mfu == pytest.approx(of_script["mfu"], rel=1e-5)
    stages = list(zip(of_run.pop("stages"), of_script.pop("stages"), strict=True))
    for theirs, own in [(of_run, of_script), *stages]:
        assert theirs.keys() == own.keys()
        assert {key: value for key, value in own.items() if key not in MEASURED} == {
            key: value for key, value in theirs.items() if key not in MEASURED}
    alone = Pipeline(Model.sequential(nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss()), torch.optim.SGD, stages=1)
    assert alone.usage()[0].idle_s == 0.0, "there is nobody to wait for"


def test_the_commands_on_runs_read_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a stream, whose evaluations make updates: each has one line."""
    with RecordedRun(pipeline(Asynchronous("pipedream", update_every=2)), tmp_path / "run", updates=14,
                     tokens_per_sample=5, next_tokens=True, trace=True, tensorboard=True) as run:
        for step in run.train(batches()):
            if step.index == 4:
                loss, found = run.evaluate(batches(2), outputs="output")
                run.log(largest=found["output"].max(), broken=float("nan"))
        assert step.index == 13
    recorded = lines(tmp_path / "run")
    assert [line["step"] for line in recorded if "loss" in line] == list(range(14))
    assert "tokens/s" in capsys.readouterr().err
    assert recorded[0]["perplexity"] == pytest.approx(exp(recorded[0]["loss"]), rel=1e-5)
    [at] = [number for number, line in enumerate(recorded) if "evaluation_loss" in line]
    assert recorded[at]["evaluation_loss"] == loss
    assert recorded[at]["step"] == recorded[at - 1]["step"] > 4
    assert recorded[at + 1]["values"] == {"largest": float(found["output"].max()), "broken": None}
    summary = recorded[-1]["summary"]
    assert (summary["samples_per_step"], summary["steps_done"], summary["mfu"]) == (4, 14, None)
    assert summary["tokens_per_s"] == pytest.approx(5 * summary["samples_per_s"], rel=1e-5), "of six digits each"
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("largest")] == pytest.approx([float(found["output"].max())])
    capsys.readouterr()
    assert main(["watch", str(tmp_path / "run")]) == main(["trace", str(tmp_path / "run")]) == 0
    assert "\nended\nupdate 14 of 14  " in capsys.readouterr().out
    assert "pipedream" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("every", [1, 4])
def test_the_samples_of_unequal_batches_are_those_that_were_trained(every: int, tmp_path: Path) -> None:
    sizes = iter([16, 8, 16, 8, 12, 4])
    unequal = ({name: value.repeat(2, *[1] * (value.dim() - 1))[:next(sizes)] for name, value in batch.items()}
               for batch in ({"input": each["input"]} for each in batches(6)))
    given = [{**each, "target": torch.zeros(len(each["input"]), dtype=torch.int64)} for each in unequal]
    pipe = pipeline(Asynchronous("pipedream", update_every=every))
    with RecordedRun(pipe, tmp_path / "run", tokens_per_sample=7, trace=True) as run:
        for step in run.train(given):
            if step.index in (0, 1, 3):
                run.evaluate(given[:1])  # drains: several updates at once
    assert pipe.position.samples == 64
    summary = lines(tmp_path / "run")[-1]["summary"]
    assert summary["samples_per_step"] == round(64 / pipe.position.updates)
    assert (sum(run._metrics.samples), sum(run._metrics.tokens)) == (64, 7 * 64)


def test_an_evaluation_of_the_average_is_told_from_that_of_the_weights(tmp_path: Path,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    with RecordedRun(pipeline(average=0.9), tmp_path / "run", updates=2) as run:
        list(run.train(batches()))
        assert re.search(r"update 2/2: loss [\d.]+  [\d,.]+ samples/s  ", capsys.readouterr().err), "none has tokens"
        losses = [run.evaluate(batches(2), averaged=averaged) for averaged in (True, False)]
    recorded = {key: value for line in lines(tmp_path / "run") for key, value in line.items() if "evaluation" in key}
    assert losses[0] != losses[1]
    assert recorded == {"evaluation_loss_averaged": losses[0], "evaluation_loss": losses[1]}


def test_a_signal_ends_training_and_a_second_one_does_what_it_did(tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    before, interrupted = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with RecordedRun(pipeline(), tmp_path / "run", print_every=2) as run:
        for step in run.train(batches()):
            if step.index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                assert signal.getsignal(signal.SIGTERM) is before
        assert list(run.train(batches())) == [], "the next epoch"
    assert (step.index, run.stopped_by) == (2, "SIGTERM")
    assert lines(tmp_path / "run")[-1]["summary"]["steps"] == 3
    said = capsys.readouterr().err
    assert "update 2: loss " in said
    assert said.endswith("stopped by SIGTERM after update 3\n")
    assert signal.getsignal(signal.SIGINT) is interrupted


def test_a_script_that_fails_and_one_that_comes_to_its_folder(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(pipeline(), tmp_path)
    with pytest.raises(ZeroDivisionError), run:
        sum(1 / step.index for step in run.train(batches()))
    assert main(["watch", str(tmp_path)]) == 1
    assert "error: ZeroDivisionError: division by zero (rank 0)" in capsys.readouterr().err
    (tmp_path / "rank0.failure.json").unlink()
    (tmp_path / "running").write_text(f"process {2**22 + 1} on {socket.gethostname()}")  # as if it had been killed
    assert main(["watch", str(tmp_path)]) == 1
    assert "is gone\nhint: see what its script printed" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"there is a run in '{tmp_path}'"), RecordedRun(pipeline(), tmp_path):
        pass


def test_a_program_without_standard_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [step.loss for step in pipeline().train(batches(4))]
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)
    with RecordedRun(pipeline(), tmp_path / "run", updates=len(wanted), print_every=1, trace=True) as run:
        assert [step.loss for step in run.train(batches(4))] == wanted


def test_flops_that_are_not_those_of_the_layers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="flops has 2 numbers, the model 3 layers"):
        RecordedRun(pipeline(), tmp_path, flops=[1.0, 2.0])
