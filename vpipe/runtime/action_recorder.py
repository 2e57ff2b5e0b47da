"""Record the actions of a rank: when each ran, and what it held in memory then; label them for torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from torch.profiler import record_function

from vpipe.errors import RunError
from vpipe.runtime.activations import ActivationCounter
from vpipe.runtime.microbatches import Signature
from vpipe.runtime.stage import Stage
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import PER_MICROBATCH, Action, Op

MOST_ACTIONS = 100_000
"""Per rank: about 7 MB in its file."""

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT
_RECOMPUTE, _USE = Op.RECOMPUTE, Op.USE
"""To name a member of an enumeration takes longer than to record an action."""


class Recorded(NamedTuple):
    """One action as it was executed.

    Attributes:
        op, stage: of the action.
        number: of the microbatch, or of the stage's update or version; all count on where a run is resumed.
        start_s, end_s: by the ``perf_counter`` of the rank's process.
        waited_s: the part of it spent waiting for another rank; in a forward or backward it comes first.
        held_bytes: activations that the rank keeps for backwards after it, and what waits between their halves.
        versions: of its weights that the stage holds after it; 0 where the stage is on another rank (tied weights).
    """

    op: Op
    stage: int
    number: int
    start_s: float
    end_s: float
    waited_s: float
    held_bytes: int
    versions: int

    def __str__(self) -> str:
        """Return a JSON array; the action in its text form."""
        op, stage, number, start_s, end_s, waited_s, held, versions = self
        return f'["{stage}{op}{number}", {start_s:.7f}, {end_s:.7f}, {waited_s:.7f}, {held}, {versions}]'


class Evaluated(NamedTuple):
    """An evaluation, whose actions are not recorded."""

    start_s: float
    end_s: float

    def __str__(self) -> str:
        """Return a JSON object."""
        return f'{{"evaluation": [{self.start_s:.7f}, {self.end_s:.7f}]}}'


@dataclass(slots=True)
class _Kind:
    """Microbatches of which a stage keeps equally much.

    Attributes:
        bytes: kept after the forward, after a recomputation, between the halves of the backward.
        known: whether a microbatch has been through all of it; until then each is counted.
    """

    bytes: dict[Op, int] = field(default_factory=dict)
    known: bool = False


@dataclass(slots=True)
class _InFlight:
    kind: _Kind
    kept: ActivationCounter | None
    bytes: int = 0


class Recorder:
    """Execute the actions of a worker and record each; ``USE`` as taking no time.

    The records are tuples in a list, which :meth:`pop_records` empties off the hot path. The bytes kept for backwards
    are counted for the first microbatches of every shape, then known.

    Attributes:
        count: actions recorded so far. After ``limit`` of them the worker works as if there were no recorder.
    """

    def __init__(self, worker: Worker, limit: int) -> None:
        self.worker, self.count = worker, 0
        self._limit = limit
        self._records: list[tuple[Op, int, int, float, float, float, int, int] | Evaluated] = []
        self._held = 0
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._kinds: dict[tuple[int, bool, Signature], _Kind] = defaultdict(_Kind)

    @property
    def full(self) -> bool:
        """Return whether nothing more is recorded."""
        return self.count >= self._limit

    @property
    def waiting(self) -> int:
        """Return how many records there are to be taken."""
        return len(self._records)

    def pop_records(self) -> list[Recorded | Evaluated]:
        """Return the records since the last call, in order, and drop them here."""
        records, self._records = self._records, []
        return [each if isinstance(each, Evaluated) else Recorded(*each) for each in records]

    def stop(self) -> None:
        """Record nothing more."""
        self._limit = self.count
        self._records.clear()

    def execute(self, action: Action) -> None:
        """Execute and record one action of training."""
        worker, op, stage, index = self.worker, action.op, action.stage, action.microbatch
        if self.count >= self._limit:
            worker.execute(action)
            return
        kept = self._counter_for(op, stage, index) if op is _FORWARD or op is _RECOMPUTE else None
        transport = worker.transport
        waited, started = transport.wait_s, perf_counter()
        if kept is None:
            worker.execute(action)
        else:
            _counted(worker, action, kept)
        ended = started if op is _USE else perf_counter()
        self.count += 1
        if op is _FORWARD or op is _RECOMPUTE or op is _INPUT:
            self._keep(op, stage, index)
        elif op is _BACKWARD or op is _WEIGHT:
            self._drop(stage, index)
        segment = worker.segment
        number = segment.number(index) if op in PER_MICROBATCH else segment.update_number(stage, index)
        here = worker.stages.get(stage)
        self._records.append((op, stage, number, started, ended, transport.wait_s - waited, self._held,
                            0 if here is None else here.weights.version_count))

    def abandon(self) -> None:
        """Forget microbatches that failed; their actions stay recorded."""
        self._in_flight.clear()
        self._held = 0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Record an evaluation."""
        started = perf_counter()
        yield
        if not self.full:
            self._records.append(Evaluated(started, perf_counter()))

    # -- what does not depend on microbatches

    def weight_bytes(self) -> dict[int, int]:
        """Return the bytes of one version of the weights of each stage of the rank, with those that it borrows."""
        return {index: sum(leaf.nbytes for weights in (stage.weights, *stage.borrowed.values())
                           for leaf in weights.leaves()) for index, stage in self.worker.stages.items()}

    def static_bytes(self) -> dict[int, int]:
        """Return the bytes beside versions: gradients, the optimizer's present state, masters of rounded weights,
        parameters that are not trained."""
        optimizers = self.worker.optimizer_steps.optimizers
        return {index: size + sum(tensor.nbytes for tensor in optimizers[index].state_tensors())
                + _beside_versions(self.worker.stages[index]) for index, size in self.weight_bytes().items()}

    # -- what is kept

    def _counter_for(self, op: Op, stage: int, microbatch: int) -> ActivationCounter | None:
        """Return the counter of an action's activations, if its microbatch is one that is counted."""
        if op is _FORWARD:
            segment = self.worker.segment
            kind = self._kinds[stage, self.worker.is_split(stage, microbatch), segment.signature(microbatch)]
            self._in_flight[stage, microbatch] = _InFlight(kind, None if kind.known else ActivationCounter())
        return self._in_flight[stage, microbatch].kept

    def _keep(self, op: Op, stage: int, microbatch: int) -> None:
        """Add what an action keeps."""
        mine = self._in_flight[stage, microbatch]
        sizes = mine.kind.bytes
        if mine.kept is not None:
            sizes[op] = mine.kept.bytes(self.worker.records[stage, microbatch],
                                        self.worker.stages[stage].modules.values())
        # What the first microbatch did not have is an R in a stage that recomputes nothing.
        now = sizes.get(op, mine.bytes)
        self._held += now - mine.bytes
        mine.bytes = now

    def _drop(self, stage: int, microbatch: int) -> None:
        """Take away what a microbatch kept."""
        mine = self._in_flight.pop((stage, microbatch))
        mine.kind.known = True
        self._held -= mine.bytes


def _counted(worker: Worker, action: Action, kept: ActivationCounter) -> None:
    """Execute an action while the bytes that it keeps are counted."""
    try:
        with kept.counting():
            worker.execute(action)
    except RunError as error:
        if "saved tensor hooks" in error.what:
            error.hint = "what such a layer keeps cannot be counted for the timeline of the run: set trace to false"
        raise


def _beside_versions(stage: Stage) -> int:
    """Return the bytes of master weights in memory of their own and of parameters that are not trained."""
    masters = stage.weights.masters.values() if stage.precision.pure else ()
    return sum(master.nbytes for master in masters) + sum(
        p.nbytes for module in stage.modules.values() for p in module.parameters() if not p.requires_grad)


def label_actions(worker: Worker) -> Callable[[], None]:
    """Label every action of a worker with its text form, such as ``0F3``, from now on.

    The number is the run's, as in the record of a run (:class:`~vpipe.runtime.action_recorder.Recorded`).

    Returns:
        A function that removes the labels; without them an action costs what it always did.
    """
    plain = worker.operations

    def labelled(op: Op, operation: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def carried_out(stage: int, index: int) -> None:
            segment = worker.segment
            number = segment.number(index) if op in PER_MICROBATCH else segment.update_number(stage, index)
            with record_function(f"{stage}{op}{number}"):
                operation(stage, index)

        return carried_out

    def remove_labels() -> None:
        worker.operations = plain

    worker.operations = {op: labelled(op, operation) for op, operation in plain.items()}
    return remove_labels
