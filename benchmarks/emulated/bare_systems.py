"""A bare loop: sleeps and passes small messages through shared memory; the least that this machine can do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkContext
from multiprocessing.synchronize import Semaphore

import torch
from case import Case
from device import WIDTH, pause
from orders import ORDERS, Order
from system import System, Updates

from vpipe.schedules.assignment import Assignment, Placement
from vpipe.schedules.kinds import Op


class Boxes:
    """Where messages of one direction lie until they are taken: per receiving stage one place per microbatch."""

    def __init__(self, context: ForkContext, placement: Placement, microbatches: int) -> None:
        self.places = microbatches
        self._places = torch.zeros(len(placement), microbatches, 1, WIDTH).share_memory_()
        self._arrived: list[list[Semaphore]] = [[context.Semaphore(0) for _ in ranks] for ranks in placement]

    def put(self, stage: int, microbatch: int, message: torch.Tensor) -> None:
        """Give a message to a stage, or to that of its copies which takes the microbatch."""
        self._places[stage, microbatch].copy_(message)
        self._of(stage, microbatch).release()

    def take(self, stage: int, microbatch: int) -> torch.Tensor:
        """Wait for a message: those of a copy come in the order of microbatches."""
        self._of(stage, microbatch).acquire()
        return self._places[stage, microbatch].clone()

    def _of(self, stage: int, microbatch: int) -> Semaphore:
        copies = self._arrived[stage]
        return copies[Assignment.replica_of(microbatch, len(copies))]


def _updates(order: Order, forth: Boxes, back: Boxes, case: Case, rank: int) -> Updates:
    schedule, times = order.schedule(case), case.times.share(order.chunks)
    program = [(a.op, a.stage, a.microbatch) for a in schedule.programs[rank] if a.op is not Op.STEP]

    def away(stage: int, microbatch: int) -> bool:
        return schedule.assignment.rank_of(stage, microbatch) not in (rank, -1)

    forward_s, half_s = float(times.forward_s), float(times.backward_s / 2)
    message = torch.zeros(1, WIDTH)
    while True:
        for op, stage, microbatch in program:
            if op is Op.FORWARD:
                if away(stage - 1, microbatch):
                    message = forth.take(stage, microbatch)
                pause(forward_s)
                if away(stage + 1, microbatch):
                    forth.put(stage + 1, microbatch, message)
            elif op.returns:
                if away(stage + 1, microbatch):
                    message = back.take(stage, microbatch)
                pause(half_s)
                if op is Op.BACKWARD:
                    pause(half_s)
                if away(stage - 1, microbatch):
                    back.put(stage - 1, microbatch, message)
            else:
                pause(half_s)
        yield


def bare_systems(context: ForkContext, case: Case) -> Iterator[System]:
    """One per schedule; to be made before the processes are, which share its memory."""
    for order in ORDERS:
        forth, back = (Boxes(context, order.placement(case.ranks), case.microbatches) for _ in range(2))
        yield System("bare", order.name, order.chunks, partial(_updates, order, forth, back))
