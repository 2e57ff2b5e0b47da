"""Numbers that layers read in their forward, and that change, by a layer or the script, before it is recomputed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from vpipe import Cut, Layer, Model, Pipeline

SCRIPT = {"factor": 1.0}
"""What a script sets between updates."""


class Warm(nn.Module):
    """Scales by a number of the script, and by its own, an attribute or a buffer, that every forward lowers."""

    scale: Any

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(4, 4), 1.0 if changes == "script" else 0.9
        if changes == "buffer":
            self.register_buffer("scale", torch.ones(()))
        else:
            self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * self.rate
        return torch.tanh(self.linear(x)) * self.scale * SCRIPT["factor"]


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return mse_loss(super().forward(h), y)


def losses(changes: str, schedule: str, drains: bool, recompute: float) -> list[float]:
    """Train four updates; after the second one the script perhaps sets its number."""
    SCRIPT["factor"], generator = 1.0, torch.Generator().manual_seed(1)
    model = Model([Layer("warm", partial(Warm, changes), ("x",)), Layer("head", Head, ("h", "y"), ("loss",))],
                  ("x", "y"))
    pipe = Pipeline(model, partial(torch.optim.SGD, lr=0.5), Cut([1, 1], recompute=[recompute, 0.0]), schedule, 4)
    found = []
    for step in pipe.train([{name: torch.randn(8, 4, generator=generator) for name in "xy"} for _ in range(4)]):
        found.append(step.loss)
        if changes == "script" and step.index == 1:
            found += [later.loss for later in pipe.drain()] if drains else []
            SCRIPT["factor"] = 0.5
    return found


@pytest.mark.parametrize(("changes", "schedule", "drains", "exact"), [
    ("attribute", "gpipe", False, False), ("buffer", "pipedream", False, True), ("script", "1f1b", False, True),
    ("script", "zb_h1", False, True), ("script", "pipedream", False, False), ("script", "pipedream", True, True)])
def test_recomputation_is_exact_for_a_buffer_and_for_a_number_set_while_nothing_is_in_flight(
        changes: str, schedule: str, drains: bool, exact: bool) -> None:
    recomputed, kept = (losses(changes, schedule, drains, recompute) for recompute in (1.0, 0.0))
    assert (recomputed == kept) is exact
