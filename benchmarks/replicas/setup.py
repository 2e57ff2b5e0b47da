"""What is compared: a pipeline of two stages, the first twice as heavy, with one or two replicas of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from device import WIDTH, Device, Times

from vpipe import Cut, Execution, Layer, Model, Pipeline
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.simulator.timeline import simulate
from vpipe.schedules.size import Placement

MICROBATCHES, BATCHES = 16, 3
"""Of a batch, and batches of a turn: an update each with a flush, a stream without."""


@dataclass(frozen=True)
class Setup:
    """One system.

    Attributes:
        schedule: vpipe's name of it.
        widths: replicas of either stage.
        light: how long a microbatch takes on the second stage; on the first it takes twice as long.
    """

    schedule: str
    widths: tuple[int, int]
    light: Times

    def __str__(self) -> str:
        return f"{self.schedule} {'-'.join(map(str, self.widths))}, {self.light}"

    @property
    def placement(self) -> Placement:
        """Replicas next to each other."""
        first, second = self.widths
        return tuple(range(first)), tuple(range(first, first + second))

    @property
    def times(self) -> tuple[Times, Times]:
        """Of a microbatch on either stage."""
        return Times(2 * self.light.forward_s, 2 * self.light.backward_s), self.light

    def formula_s(self) -> float:
        """A turn, if messages and programs took no time: as simulated."""
        flush = RegisteredSchedule.named(self.schedule).flush
        schedule = build(self.schedule, self.placement, MICROBATCHES * (1 if flush else BATCHES))
        costs = Costs(tuple(StageCosts(one.forward_s, one.backward_s / 2, one.backward_s / 2) for one in self.times))
        return float(simulate(schedule, costs).makespan_s) * (BATCHES if flush else 1)

    def turn(self) -> Callable[[], None]:
        """On a rank: what makes a turn, from an empty pipeline to an empty one."""
        layers = [Layer("heavy", partial(Device, self.times[0], first=True, last=False), inputs=("input",),
                        outputs=("h",)),
                  Layer("light", partial(Device, self.times[1], first=False, last=True), inputs=("h",),
                        outputs=("loss",))]
        pipe = Pipeline(Model(layers, batch=("input",)), lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                        stages=Cut([1, 1], ranks=self.placement), schedule=self.schedule, microbatches=MICROBATCHES,
                        execution=Execution(device="cpu"))

        def train() -> None:
            for _ in pipe.train(repeat({"input": torch.ones(MICROBATCHES, WIDTH)}, BATCHES)):
                pass

        return train
