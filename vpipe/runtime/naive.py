"""Executor ``naive``: finish all that an action began before the next action."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vpipe import accelerator
from vpipe.runtime.transport.transport import TransferKind
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import Kind, Op

_SENT = {Op.SEND_F: TransferKind.ACTIVATIONS, Op.SEND_B: TransferKind.GRADIENTS,
         Op.SEND_W: TransferKind.TIED_WEIGHTS, Op.SEND_G: TransferKind.TIED_GRADIENTS}
"""The kind of transfer that a send makes."""


class NaiveWorker(Worker):
    """Wait for each send, and on a GPU for the device after every action.

    The checker has proved that sends which wait for their posted receives never deadlock
    (:func:`~vpipe.schedules.checker.no_deadlock_rendezvous`). A receiver that waits for a header posts later, so sends
    are not waited for until the first gradient has come back. A send through shared memory ends when it is in there.
    Norms, losses and sums over replicas are no sends of the program; they are waited for where they are received.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.operations = {op: partial(self._to_its_end, op, operation) for op, operation in self.operations.items()}

    def _to_its_end(self, op: Kind, operation: Callable[[int, int], None], stage: int, index: int) -> None:
        operation(stage, index)
        for here in self.stages.values():
            accelerator.synchronize(here.device)
            break
        if op in _SENT:
            self.transport.wait_sent(_SENT[op])
