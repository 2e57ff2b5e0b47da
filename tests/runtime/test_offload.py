"""Activations that a schedule copies to the host leave the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from pipelines import parts
from torch import nn

from vpipe import Model, Pipeline
from vpipe.runtime.saved_tensors import SavedTensors
from vpipe.runtime.values import storage_of
from vpipe.schedules import registry
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.registry import Program, RegisteredSchedule


def test_offloaded_tensors_leave_the_device_and_weights_stay() -> None:
    """What autograd saves is copied, each storage once; weights and inputs are no activations."""
    linear = nn.Linear(3, 3)
    given = torch.randn(2, 3)
    saved = SavedTensors(linear.parameters(), [given])
    with saved.saving():
        hidden = linear(given).sigmoid()
        loss = (hidden * hidden).sum()
    assert loss.requires_grad
    assert [storage_of(holder.tensor) for holder in saved] == [storage_of(hidden)] * 3
    saved.offload()
    assert list(map(storage_of, saved.tensors())) == [storage_of(given)]
    assert len(saved._on_host) == 1


fetch = SavedTensors.fetch


def offloading(program: Program) -> Program:
    """The schedule with every second microbatch's activations on the host from its forward until right before use."""
    @wraps(program)
    def generate(*arguments: Any, **options: Any) -> Iterator[Action]:
        for action in program(*arguments, **options):
            away = action.microbatch % 2 == 0
            if away and (action.op.returns or action.op is Op.RECOMPUTE):
                yield Action(Op.FETCH, action.stage, action.microbatch)
            yield action
            if away and action.op is Op.FORWARD:
                yield Action(Op.OFFLOAD, action.stage, action.microbatch)

    return generate


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "chimera", "pipedream", "2bw"])
def test_each_kind_of_schedule_is_exact_with_offloaded_activations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; in every second stage layers are recomputed."""
    recipe = RegisteredSchedule.named(name)
    monkeypatch.setitem(registry._REGISTERED, "away", replace(recipe, name="away", program=offloading(recipe.program)))
    stages = 2 * recipe.chunks
    fetched: list[int] = []
    monkeypatch.setattr(SavedTensors, "fetch", lambda saved: (fetched.append(len(saved._holders)), fetch(saved)))
    plain, away = (trained(schedule, stages) for schedule in (name, "away"))
    assert plain == away
    assert len(fetched) == 2 * 4 * stages, "half of the microbatches of two batches"
    assert max(fetched) > 0


def trained(schedule: str, stages: int) -> list[float]:
    """The losses of two batches, whose second depends on every gradient of the first, and the sum of the weights."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(stages)))
    model = Model.sequential(layers, loss=nn.MSELoss())
    registered = RegisteredSchedule.named(schedule)
    options = {} if registered.flush else {"update_every": registered.update_every(stages)}
    pipe = Pipeline(model,
                    **parts(stages=stages, schedule=schedule, microbatches=8, seed=0,
                            recompute=[0.0, 1.0] * (stages // 2),
                            optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1), **options))
    batch = {"input": torch.arange(64.0).reshape(16, 4) / 64, "target": torch.ones(16, 4)}
    losses = [step.loss for step in pipe.train([batch] * 2)]
    return [*losses, *(float(value.double().sum()) for value in pipe.state_dict().values())]
