"""vpipe under its schedules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat

import torch
from case import Case
from device import WIDTH, Device, Times
from orders import ORDERS, Order
from system import System, Updates

import vpipe
from vpipe import Execution, Layer, Model, Pipeline


def emulated_model(stages: int, times: Times) -> Model:
    """A device per stage."""
    return Model([Layer(f"device{i}", partial(Device, times, first=i == 0, last=i == stages - 1),
                        inputs=("h" if i else "input",), outputs=("h" if i < stages - 1 else "loss",))
                  for i in range(stages)], batch=("input",))


def _updates(order: Order, case: Case, rank: int) -> Updates:
    stages = case.ranks * order.chunks
    pipe = Pipeline(emulated_model(stages, case.times.share(order.chunks)),
                    lambda parameters: torch.optim.SGD(parameters, lr=0.0), stages=stages,
                    schedule=vpipe.Order(order.name, chunks=order.chunks), microbatches=case.microbatches,
                    execution=Execution(device="cpu"))
    for _ in pipe.train(repeat({"input": torch.ones(case.microbatches, WIDTH)})):
        yield


def vpipe_systems() -> Iterator[System]:
    """One per schedule."""
    for order in ORDERS:
        yield System("vpipe", order.name, order.chunks, partial(_updates, order))
