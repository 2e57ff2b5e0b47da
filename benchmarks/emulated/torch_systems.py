"""torch.distributed.pipelining under its schedules, as fast as it goes: no outputs kept, gradients not rescaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

import torch
from case import Case
from device import WIDTH, Device
from orders import ORDERS, Order
from system import System, Updates
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

from vpipe.schedules.assignment import stages_of_rank

RIVALS = ("zb_v", "zb_h1")
"""One of these is torch's best at p/2, p and 2p microbatches: the others were tried."""


Make = Callable[[list[PipelineStage], Callable[[Tensor, Tensor], Tensor]], torchs._PipelineSchedule]
"""``make(stages of a rank, loss function)`` is a schedule of torch's."""


def updates(devices: Mapping[int, Device], stages: int, microbatches: int, make: Make) -> Updates:
    """Make one update after the other on a rank with some of the stages, by number."""
    # The last device's mean is the loss: torch wants the stage and its loss apart.
    def loss_fn(hidden: Tensor, _: Tensor) -> Tensor:
        return hidden.mean() / microbatches

    schedule = make([PipelineStage(device, i, stages, torch.device("cpu")) for i, device in devices.items()], loss_fn)
    optimizer = torch.optim.SGD(chain.from_iterable(device.parameters() for device in devices.values()), lr=0.0)
    batch = torch.ones(microbatches, WIDTH)
    inputs = (batch,) if 0 in devices else ()
    target = batch if stages - 1 in devices else None
    while True:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            float(torch.stack(losses).detach().sum())
        yield


def _updates(order: Order, peer: type[torchs._PipelineSchedule], case: Case, rank: int) -> Updates:
    placement, m, times = order.placement(case.ranks), case.microbatches, case.times.share(order.chunks)
    single = issubclass(peer, torchs.PipelineScheduleSingle)
    return updates({i: Device(times, first=i == 0, last=False) for i in stages_of_rank(placement, rank)},
                   len(placement), m, lambda parts, loss_fn: peer(
                       parts[0] if single else parts, m, loss_fn=loss_fn, scale_grads=False))


def torch_systems() -> Iterator[System]:
    """One per schedule that torch has."""
    for order in ORDERS:
        if order.peer is not None:
            yield System("torch", order.name, order.chunks, partial(_updates, order, order.peer))
