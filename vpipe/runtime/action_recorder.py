"""Record the actions of a rank with their times and memory; label them for torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from vpipe import accelerator
from vpipe.errors import RunError
from vpipe.runtime.activations import Record
from vpipe.runtime.microbatches import Signature
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.values import ActivationCounter, bytes_of
from vpipe.runtime.worker import Worker
from vpipe.schedules.kinds import GATHERED, Action, Kind, RecordedAction, RecordedEvaluation

MOST_ACTIONS = 100_000
"""Most actions that are recorded per rank: about 7 MB in its file."""


@dataclass(slots=True)
class _Sizes:
    """Bytes that a stage keeps of each microbatch of one shape.

    Attributes:
        bytes: after the forward, after a recomputation, between the halves of the backward.
        known: whether a microbatch has had its whole backward; until then each is counted.
    """

    bytes: dict[Kind, int] = field(default_factory=dict)
    known: bool = False


@dataclass(slots=True)
class _Counted:
    """What a recorder knows of the bytes of a record, which lies among the values of a rank.

    Attributes:
        counter: None where the sizes are known.
        bytes: that the record holds now.
    """

    recorder: Recorder
    sizes: _Sizes
    counter: ActivationCounter | None
    bytes: int = 0


class _DeviceTimes:
    """When a device came to marks in its queue, in seconds of ``perf_counter``: the host only launches, and goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        accelerator.synchronize(device)  # it comes to this mark now
        self._last, self._at_s = self.mark(), perf_counter()

    def mark(self) -> torch.Event:
        return accelerator.mark(self._device)

    def read(self, records: Sequence[Any]) -> Iterator[RecordedAction | RecordedEvaluation]:
        """Return records with the device's times, once it has come to the last mark."""
        if actions := [each for each in records if not isinstance(each, RecordedEvaluation)]:
            actions[-1][4].synchronize()
        for each in records:
            if isinstance(each, RecordedEvaluation):
                yield each
                continue
            op, stage, number, started, ended, (host_s, waits), held, versions = each
            start_s, end_s = self._second(started), self._second(ended)
            waited_s = min(host_s, end_s - start_s) + sum(1e-3 * begun.elapsed_time(end) for begun, end in waits)
            yield RecordedAction(op, stage, number, start_s, end_s, waited_s, held, versions)

    def _second(self, mark: torch.Event) -> float:
        self._at_s += 1e-3 * self._last.elapsed_time(mark)  # of the last, not of the first: they are given in fp32
        self._last = mark
        return self._at_s


class Recorder:
    """Record the actions of training of a worker, among whose ``around`` it is; ``USE`` as taking no time.

    The bytes kept for backwards are counted for the first microbatches of every shape only. Nothing is recorded while
    microbatches are in flight whose forwards came before the recorder: their bytes are unknown.

    Attributes:
        count: actions recorded so far; after ``limit`` of them none is.
    """

    def __init__(self, worker: Worker, limit: int) -> None:
        self.worker, self.count = worker, 0
        self._limit = limit
        self._records: list[tuple[Kind, int, int, Any, Any, Any, int, int] | RecordedEvaluation] = []
        device = next(iter(worker.stages.values())).device
        self._device_times = None if device.type == "cpu" else _DeviceTimes(device)
        self._now: Callable[[], Any] = perf_counter if self._device_times is None else self._device_times.mark
        self._weighed = dict[int, int]()
        self._gathered: dict[int, int] = {}  # bytes of weights, by stage
        self._sizes: dict[tuple[int, bool, Signature], _Sizes] = defaultdict(_Sizes)

    @property
    def full(self) -> bool:
        """Return whether nothing more is recorded."""
        return self.count >= self._limit

    @property
    def waiting(self) -> int:
        """Return the number of records for :meth:`pop_records`."""
        return len(self._records)

    def pop_records(self) -> list[RecordedAction | RecordedEvaluation]:
        """Return the records since the last call, in order, and drop them here."""
        records, self._records = self._records, []
        if self._device_times is not None:
            return list(self._device_times.read(records))
        return [each if isinstance(each, RecordedEvaluation) else RecordedAction(*each) for each in records]

    def stop(self) -> None:
        """Record nothing more."""
        self._limit = self.count
        self._records.clear()

    def __call__(self, action: Action, run: Callable[[], None]) -> None:
        """Execute an action by ``run``, and record it if it is one of training."""
        worker, (op, stage, index) = self.worker, action
        if not worker.segment.training:
            run()
            return
        self._weighed = self._weighed or self.weight_bytes()  # between updates modules have the masters
        if self.full:
            run()
            return
        counted = self._counted(op, stage, index)
        counter = counted.counter if counted is not None and (op.uses_version or op.remembers) else None
        transport, waits = worker.transport, list[tuple[torch.Event, torch.Event]]()
        if self._device_times is not None and transport.ordered:  # else the host waits
            transport.device_waits = waits
        waited, started = transport.wait_s, self._now()
        try:
            if counter is None:
                run()
            else:
                _run_counted(run, counter)
        finally:
            transport.device_waits = None
        ended, waited = started if op.chooses else self._now(), transport.wait_s - waited
        if counted is not None and (record := worker.values.record(stage, index)) is not None:
            self._keep(op, counted, record, stage)
        elif counted is not None:
            counted.sizes.known = not worker.stages[stage].offloaded
        elif op.memory is not None and GATHERED in op.memory.takes:
            leaves = worker.stages[stage].weights.leaves()  # they stand in place of the parts of static bytes
            own = sum(local(leaf).nbytes for leaf in worker.fully_sharded.divided[stage])
            self._gathered[stage] = 2 * sum(leaf.nbytes for leaf in leaves) - own  # with their gradients
        elif op.memory is not None and GATHERED in op.memory.frees:
            del self._gathered[stage]
        held = sum(self._gathered.values()) + worker.p2p.kept_bytes
        for record in worker.values.records().values():
            if (known := self._known(record)) is None:
                return
            held += known.bytes
        self.count += 1
        here = worker.stages.get(stage)
        self._records.append((op, stage, worker.segment.number_of(action), started, ended,
                              waited if self._device_times is None else (waited, waits),
                              held, 0 if here is None else here.weights.version_count))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Record an evaluation."""
        started = perf_counter()
        yield
        if not self.full:
            self._records.append(RecordedEvaluation(started, perf_counter()))

    def weight_bytes(self) -> dict[int, int]:
        """Return the bytes of one version of the weights of each stage of the rank, with those that it borrows."""
        return self._weighed or {index: bytes_of(leaf for weights in (stage.weights, *stage.borrowed.values())
                                                 for leaf in weights.leaves())
                                 for index, stage in self.worker.stages.items()}

    def static_bytes(self) -> dict[int, int]:
        """Return the bytes of each stage besides versions: gradients, the optimizer's present state, masters of rounded
        weights, last changes where late gradients are corrected, parameters that are not trained."""
        return {index: size + self.worker.optimizer_steps.state_bytes(index)
                + bytes_of(p for module in self.worker.stages[index].modules.values()
                           for p in module.parameters() if not p.requires_grad)
                for index, size in self.weight_bytes().items()}

    def _known(self, record: Record | None) -> _Counted | None:
        """Return what this recorder knows of a record; None where it has not counted the record from its forward on."""
        known: _Counted | None = None if record is None else record.counted
        return known if known is not None and known.recorder is self else None

    def _counted(self, op: Kind, stage: int, microbatch: int) -> _Counted | None:
        """Return what is known of the record that an action makes, changes or takes; None where it does neither."""
        worker = self.worker
        if not (op.per_microbatch and worker.segment.assignment.trains(stage)):
            return None
        if not op.uses_version:
            changes = op.remembers or op.returns or op.completes
            return self._known(worker.values.record(stage, microbatch)) if changes else None
        segment = worker.segment
        sizes = self._sizes[stage, worker.is_split(stage, microbatch),
                            segment.loader.signature(segment.first + microbatch)]
        before = [(earlier, microbatch) for earlier in worker.stages if earlier < stage]
        before += [(stage, microbatch - 1)] if segment.assignment.continues(microbatch) else []
        return _Counted(self, sizes, None if sizes.known else ActivationCounter([
            known.counter for key in before
            if (known := self._known(worker.values.record(*key))) and known.counter]))

    def _keep(self, op: Kind, counted: _Counted, record: Record, stage: int) -> None:
        """Take note of the bytes that an action keeps."""
        record.counted, sizes = counted, counted.sizes.bytes
        if counted.counter is not None:
            sizes[op] = counted.counter.bytes(record.tensors(), record.fields.values(),
                                              self.worker.stages[stage].modules.values())
        # An op that the first microbatch did not have is an R in a stage that recomputes nothing.
        if op in sizes:
            counted.bytes = sizes[op]


def _run_counted(run: Callable[[], None], counter: ActivationCounter) -> None:
    try:
        with counter.counting():
            run()
    except RunError as error:
        if "saved tensor hooks" in error.what:
            error.hint = "what such a layer keeps cannot be counted for the timeline of the run: set trace to false"
        raise


def labelled(worker: Worker, action: Action, run: Callable[[], None]) -> None:
    """Execute an action under a label for torch's profiler: its text form with the run's number, such as ``0F3``."""
    with record_function(f"{action.stage}{action.op}{worker.segment.number_of(action)}"):
        run()
