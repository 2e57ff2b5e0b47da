"""vpipe under its schedules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat

import torch
from case import Case
from device import WIDTH, Device
from entrant import Entrant, Updates
from orders import ORDERS, Order

from vpipe import Layer, Model, Pipeline


def _updates(order: Order, case: Case, rank: int) -> Updates:
    stages, times = case.ranks * order.chunks, case.times.share(order.chunks)
    layers = [Layer(f"device{i}", partial(Device, times, first=i == 0, last=i == stages - 1),
                    inputs=("h" if i else "input",), outputs=("h" if i < stages - 1 else "loss",))
              for i in range(stages)]
    pipe = Pipeline(Model(layers, batch=("input",)), stages, order.name, case.microbatches, chunks=order.chunks,
                    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), device="cpu")
    for _ in pipe.train(repeat({"input": torch.ones(case.microbatches, WIDTH)})):
        yield


def vpipe_entrants() -> Iterator[Entrant]:
    """One per schedule."""
    for order in ORDERS:
        yield Entrant("vpipe", order.name, order.chunks, partial(_updates, order))
