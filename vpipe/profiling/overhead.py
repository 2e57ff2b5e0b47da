"""What the runtime takes for an action beside the layers: a stage that computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import nn

from vpipe.model.layer import Layer, Model
from vpipe.model.split import StageSpec
from vpipe.profiling.bench import Bench
from vpipe.profiling.counts import still
from vpipe.profiling.device import Clock
from vpipe.runtime.precision import Precision
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import MakeOptimizer

_TIMES = 40


@dataclass(frozen=True)
class Overhead:
    """Seconds that every call takes once, however many layers the stage has.

    Attributes:
        calls: by what is called, in the words of a :class:`~vpipe.plan.profile.LayerProfile`.
        step: of the optimizer, whatever it steps.
    """

    calls: Mapping[str, float]
    step: float

    def of(self, figure: str) -> float:
        return self.step if figure == "step" else self.calls[figure]

    @property
    def dispatch_s(self) -> float:
        """Of an action: a forward or a backward."""
        return (self.calls["forward"] + self.calls["backward"]) / 2


def measure_overhead(device: torch.device, clock: Clock, make_optimizer: MakeOptimizer,
                     precision: Precision) -> Overhead:
    """A stage of one layer that does nothing, less what its layer takes: what a second one adds."""
    one, two = (_times(layers, device, clock, precision) for layers in (1, 2))
    return Overhead({figure: max(0.0, 2 * one[figure] - two[figure]) for figure in one},
                    _step(device, clock, make_optimizer, precision))


def _times(layers: int, device: torch.device, clock: Clock, precision: Precision) -> dict[str, float]:
    model = Model([Layer("first", nn.Identity, ("x",)), Layer("second", nn.Identity), Layer("third", nn.Identity),
                   Layer("last", nn.Identity, outputs=("loss",))], batch=("x",))
    spec = StageSpec(1, range(1, 1 + layers), ("h",), ("h",), (), {})
    stage = Stage(model, spec, seed=0, device=device, recomputed=(), precision=precision)
    gradients = {"h": torch.ones(1, device=device, dtype=precision.dtype)}
    found: dict[str, list[float]] = {figure: [] for figure in ("forward", "backward", "input_half", "weight_half",
                                                               "recompute")}
    for again in range(_TIMES):
        for split in (False, True):
            received = [torch.ones(1, device=device, dtype=precision.dtype, requires_grad=True)]
            marks = [clock()]
            _, record = stage.forward(received, {}, (0, 0), {}, split=split)
            marks.append(clock())
            if split:
                stage.backward_input(record, gradients)
                marks.append(clock())
                stage.backward_weight(record)
            else:
                for held in record.held:
                    held.graph = None
                stage.recomputes = True
                stage.recompute(record)
                marks.append(clock())
                stage.backward(record, gradients)
            marks.append(clock())
            if again > 3:
                names = ("input_half", "weight_half") if split else ("recompute", "backward")
                for name, (start, end) in zip(("forward", *names), pairwise(marks), strict=True):
                    found[name].append(end - start)
    return {figure: median(seconds) for figure, seconds in found.items()}


def _step(device: torch.device, clock: Clock, make_optimizer: MakeOptimizer, precision: Precision) -> float:
    model = Model([Layer("tiny", partial(nn.Linear, 1, 1), ("x",), ("loss",))], batch=("x",))
    bench = Bench(model, 0, device, 0, precision)
    optimizer = still(make_optimizer, bench.stage)
    for leaf in bench.stage.weights.graded():
        leaf.grad = torch.ones_like(leaf)
    seconds = []
    for _ in range(_TIMES):
        started = clock()
        bench.step(optimizer)
        seconds.append(clock() - started)
    return median(seconds[3:])
