"""The norm of each layer's gradients is that of plain PyTorch, before clipping, with and without a flush."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from pipelines import parts
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe import Layer, Model, Pipeline
from vpipe.errors import UserError

sgd = partial(torch.optim.SGD, lr=0.1)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6, bias=False)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(h), y)


def model() -> Model:
    """A layer whose name begins as another's, one without parameters, and a head tied to the first."""
    return Model([Layer("b1", lambda: nn.Linear(6, 6), inputs=("x",)), Layer("relu", nn.ReLU),
                  Layer("b10", lambda: nn.Linear(6, 6)),
                  Layer("head", Head, inputs=("h", "y"), outputs=("loss",), ties={"out.weight": "b1.weight"})],
                 batch=("x", "y"))


def batches(count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    return [{name: torch.randn(8, 6, generator=drawn) for name in "xy"} for _ in range(count)]


@pytest.mark.parametrize("words", [
    {"grad_clip": 0.1}, {"grad_clip": math.inf}, {"grad_clip": 0.1, "replicas": 2, "zero1": True},
    {"grad_clip": 0.1, "schedule": "pipedream", "update_every": 4}], ids=["clipped", "measured", "owners", "stream"])
def test_norms_of_layers(words: dict[str, Any]) -> None:
    pipe = Pipeline(model(), **parts(stages=2, microbatches=4, optimizer=sgd, **words))
    modules = pipe.model.materialize(pipe.description.seed)
    [first] = batches(1)
    list(pipe.train([first]))
    h = modules["b10"](modules["relu"](modules["b1"](first["x"])))
    modules["head"](h, first["y"]).backward()
    expected = {name: math.sqrt(sum(p.grad.square().sum().item() for p in modules[name].parameters()))
                for name in ("b1", "b10")}
    found = pipe.gradient_norms()
    assert list(found) == ["b1", "b10"]
    # fp32 sums of some tens of terms: 2^-24 each, relative to a norm of about 1.
    assert found == pytest.approx(expected, rel=64 * 2.0 ** -24)


def test_norms_that_nothing_needs_are_refused_and_before_an_update_there_are_none() -> None:
    with pytest.raises(UserError, match=r"nothing needs norms.*\nhint: .*grad_clip=math.inf\) clips nothing"):
        Pipeline(model(), **parts(stages=2, microbatches=4, optimizer=sgd)).gradient_norms()
    assert Pipeline(model(), **parts(stages=2, optimizer=sgd, skip_not_finite=True)).gradient_norms() == {}
