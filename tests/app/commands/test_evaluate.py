"""``vpipe evaluate`` gives the loss that the run had, to the last bit, also on other data, or says why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import begin
from made_text import write_text
from small_run import metrics
from torch import nn

from vpipe import Model, Pipeline
from vpipe.app.cli import main

ASYNCHRONOUS = {"parallel__schedule": "pipedream", "parallel__update_every": 1, "checkpoint__every_steps": 2}


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What it computes: steps and losses."""
    found: list[Any] = []
    monkeypatch.setattr("vpipe.app.commands.evaluate.evaluation_text", lambda job, *computed: found.append(computed))
    return found


@pytest.mark.parametrize("changes", [
    {}, {"training__average": 0.9}, {**ASYNCHRONOUS, "training__delay_correction": "extrapolate"},
    {"training__precision": "bf16_pure", "parallel__data_parallel_size": 2},
    {"parallel__schedule": "interleaved", "training__evaluation_batches": 2}])
def test_it_is_the_loss_that_the_run_had(changes: dict[str, Any], tmp_path: Path, losses: list[Any]) -> None:
    run = begin(tmp_path, checkpoint__at_end=True, training__evaluate_every=2, **changes)
    lines = {line["step"] + 1: line for line in metrics(run)[1]}
    for at in (run, *(run / "checkpoints").glob("step-*")):
        assert main(["evaluate", str(at)]) == 0
        steps, *found = losses.pop()
        assert steps == (4 if at == run else int(at.name.partition("-")[2]))
        assert found == [value for key, value in lines[steps].items() if key.startswith("evaluation_loss")]


def test_other_data_a_moved_run_and_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(tmp_path, checkpoint__at_end=True, dataset__name="text", dataset__samples=None, model__vocab_size=-1,
                dataset__path=str(write_text(tmp_path / "text")), dataset__cache_directory=str(tmp_path / "cache"),
                model__name="gpt", model__preset=None, model__num_layers=2, model__num_heads=2)

    def said(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["evaluate", *words]) == status
        return "".join(capsys.readouterr())

    monkeypatch.chdir(shutil.copytree(run, tmp_path / "elsewhere" / "copy").parent)
    own = said(str(run))
    assert f"evaluation loss after 4 updates: {metrics(run)[1][-1]['evaluation_loss']:.4f}, perplexity " in own
    assert said("copy").partition(": ")[2] == own.partition(": ")[2]
    others = said("copy", "--data", str(write_text(tmp_path / "others", seed=1)))
    assert "bits per byte" in others.partition(": ")[2] != own.partition(": ")[2]
    shutil.move(tmp_path / "text", tmp_path / "moved")
    assert "--data PATH" in said("copy", status=2)
    assert said("copy", "--data", "../moved").partition(": ")[2] == own.partition(": ")[2]
    file = next(Path("copy").rglob("rank0.safetensors"))
    file.write_bytes(file.read_bytes()[:-4] + b"four")
    assert "error: " in said("copy", "--data", "../moved", status=2)


def test_a_checkpoint_that_no_run_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model.sequential(nn.Sequential(nn.Linear(2, 2)), nn.MSELoss())
    Pipeline(model, torch.optim.SGD, stages=1).save(tmp_path / "step-0")
    assert main(["evaluate", str(tmp_path / "step-0")]) == 2
    assert "no run made the checkpoint" in capsys.readouterr().err
