"""torch.distributed.pipelining under its schedules, as fast as it goes: no outputs kept, gradients not rescaled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch
from case import Case
from device import WIDTH, Device
from entrant import Entrant, Updates
from orders import ORDERS, Order
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from vpipe.schedules.schedule import stages_of_rank

RIVALS = ("zb_v", "zb_h1")
"""One of these is torch's best at p/2, p and 2p microbatches: the others were tried."""


def _updates(order: Order, case: Case, rank: int) -> Updates:
    placement, m = order.placement(case.ranks), case.microbatches
    stages, own = len(placement), stages_of_rank(placement, rank)
    times = case.times.share(order.chunks)
    # The last device's mean is the loss: torch wants the stage and its loss apart.
    devices = [Device(times, first=i == 0, last=False) for i in own]
    parts = [PipelineStage(device, i, stages, torch.device("cpu")) for device, i in zip(devices, own, strict=True)]

    def loss_fn(hidden: Tensor, _: Tensor) -> Tensor:
        return hidden.mean() / m

    single = issubclass(order.peer, PipelineScheduleSingle)
    schedule = order.peer(parts[0] if single else parts, m, loss_fn=loss_fn, scale_grads=False)
    optimizer = torch.optim.SGD(chain.from_iterable(device.parameters() for device in devices), lr=0.0)
    batch = torch.ones(m, WIDTH)
    inputs = (batch,) if 0 in own else ()
    target = batch if stages - 1 in own else None
    while True:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            float(torch.stack(losses).detach().sum())
        yield


def torch_entrants() -> Iterator[Entrant]:
    """One per schedule."""
    for order in ORDERS:
        yield Entrant("torch", order.name, order.chunks, partial(_updates, order))
