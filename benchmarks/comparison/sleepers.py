"""A model whose layers sleep for as long as a profile says that they compute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vpipe import Layer, Model
from vpipe.plan.profile import LayerProfile, Profile

WIDTH = 4
"""Numbers per sample and message."""


class _Clock:
    """Sleeps. What it overslept is taken off its next sleep, so that lateness does not add up."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def pause(self, seconds: float) -> None:
        due = time.perf_counter() + seconds - self._late_s
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        self._late_s = min(time.perf_counter() - due, 0.002)


CLOCK = _Clock()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        CLOCK.pause(forward_s)
        return hidden + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        CLOCK.pause(ctx.backward_s)
        return gradient, gradient.sum(0), None, None


class Sleeper(nn.Module):
    """One layer: ``h [b, WIDTH] -> h [b, WIDTH]``; the last gives the loss, a scalar."""

    def __init__(self, profile: LayerProfile, slower: float, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.forward_s, self.backward_s = slower * profile.forward.median, slower * profile.backward.median
        self.last = last

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = _Sleep.apply(hidden, self.weight, self.forward_s, self.backward_s)
        return hidden.mean() if self.last else hidden


class SleepingOptimizer(torch.optim.SGD):
    """Changes nothing, and takes the time of its layers' steps."""

    def __init__(self, parameters: list[nn.Parameter], step_s: float) -> None:
        super().__init__(parameters, lr=0.0)
        self._step_s = step_s

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sleep."""
        CLOCK.pause(self._step_s)


class Optimizers:
    """Makes the optimizer of a stage from the names of its parameters."""

    def __init__(self, profile: Profile, slower: float) -> None:
        self._step_s = {f"{layer.name}.weight": slower * layer.step.median for layer in profile.layers}

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Of these."""
        return SleepingOptimizer(list(named.values()), sum(self._step_s[name] for name in named))


def sleeping_model(profile: Profile, slower: float) -> Model:
    """The profile's layers; every second of it takes ``slower`` seconds."""
    last = len(profile.layers) - 1
    return Model([Layer(layer.name, partial(Sleeper, layer, slower, number == last), layer.reads,
                        tuple(tensor.name for tensor in layer.writes))
                  for number, layer in enumerate(profile.layers)], batch=("input",))
