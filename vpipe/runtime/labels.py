"""Names for torch's profiler: what it records, under the action that did it."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import record_function

from vpipe.runtime.worker import Worker
from vpipe.schedules.action import PER_MICROBATCH, Op


def put_labels(worker: Worker) -> Callable[[], None]:
    """Carry out every action of a worker under its text form, such as ``0F3``, from now on.

    The number is the run's, as in the record of a run (:class:`~vpipe.runtime.trace.Recorded`).

    Returns:
        What takes the labels off; without them an action costs what it always did.
    """
    plain = worker.operations

    def labelled(op: Op, operation: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def carried_out(stage: int, index: int) -> None:
            segment = worker.segment
            number = segment.number(index) if op in PER_MICROBATCH else segment.update_number(stage, index)
            with record_function(f"{stage}{op}{number}"):
                operation(stage, index)

        return carried_out

    def take_off() -> None:
        worker.operations = plain

    worker.operations = {op: labelled(op, operation) for op, operation in plain.items()}
    return take_off
