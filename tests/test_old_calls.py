"""Every call in the table of docs/python.md is refused, and the hint is the call beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import vpipe
from vpipe import Cut, Model, Pipeline, Plan
from vpipe.errors import UserError

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
ROWS = re.findall(r"^\| `(Pipeline\(.*?)` \| `(Pipeline\(.*?)` \|$", PAGE.read_text(), re.MULTILINE)
NAMES = {name: getattr(vpipe, name) for name in vpipe.__all__}


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def warmup(step: int) -> float:
    return min(1.0, step / 4)


def values() -> dict[str, object]:
    layers = [nn.Linear(2, 2) for _ in range(9)]
    return {**NAMES, "model": Model.sequential(nn.Sequential(*layers), nn.MSELoss()), "optimizer": optimizer,
            "warmup": warmup, "plan": Plan(Cut((5, 4), recompute=(0.0, 0.0)))}


def new_text(call: str) -> str:
    with pytest.raises(UserError) as refused:
        eval(call, values())
    return str(refused.value).split("\nhint: write ")[1]


def test_there_are_ten_uses() -> None:
    assert len(ROWS) >= 10


@pytest.mark.filterwarnings("ignore::vpipe.errors.PerformanceWarning")
@pytest.mark.parametrize(("old", "new"), ROWS)
def test_an_old_call(old: str, new: str) -> None:
    assert eval(new_text(old), values() | {"learning_rate_factor": warmup}).description.cut
    assert new_text(old).replace("'", '"').replace("=learning_rate_factor", "=warmup") == new


@pytest.mark.parametrize(("old", "new"), [
    ("Pipeline(model, 4, 'pipedream', 8, optimizer=optimizer)",
     "Pipeline(model, optimizer, stages=4, schedule='pipedream', microbatches=8)"),
    ("Pipeline(model, optimizer, plan=plan, grad_clip=1.0)",
     "Pipeline(model, Update(optimizer, grad_clip=1.0), stages=plan)"),
    ("Pipeline(model, stages=2, partition=[4, 5], schedule='1f1b', update_every=None, delay_correction='none', "
     "optimizer=optimizer)", "Pipeline(model, optimizer, stages=[4, 5], schedule='1f1b')"),
    ("Pipeline(model, stages=2, schedule='pipedream', delay_correction_strength=0.5, delay_correction='extrapolate', "
     "optimizer=optimizer)",
     "Pipeline(model, optimizer, stages=2, schedule=Asynchronous('pipedream', delay_correction=0.5))"),
    ("Pipeline(model, stages=3, compress=['int8', 'none'], compress_rounding='stochastic', optimizer=optimizer)",
     "Pipeline(model, optimizer, stages=3, transfers=Transfers(compress=['int8_stochastic', 'none']))")])
def test_defaults_and_repetitions_of_an_old_call(old: str, new: str) -> None:
    assert new_text(old) == new


def test_the_first_argument_is_told_apart_from_the_second() -> None:
    with pytest.raises(UserError, match="takes its arguments in another way now: got an unexpected keyword"):
        eval("Pipeline(model, stages=4, replicas=2, optimizer=optimizer)", values())
    with pytest.raises(TypeError, match="unexpected keyword argument 'stagess'"):
        Pipeline(None, None, stagess=4)  # type: ignore[arg-type, call-arg]
