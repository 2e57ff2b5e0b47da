"""Executor ``naive``: finish all that an action began before the next action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vpipe import accelerator
from vpipe.runtime.transport.transport import TransferKind
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import Action, Op

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
        self.around.append(self._to_its_end)

    def _to_its_end(self, action: Action, run: Callable[[], None]) -> None:
        run()
        here = next(iter(self.stages.values()))
        accelerator.synchronize(here.device)
        if action.op in _SENT:
            self.transport.wait_sent(_SENT[action.op])
