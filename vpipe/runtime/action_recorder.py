"""Record the actions of a rank with their times and memory; label them for torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from vpipe import accelerator
from vpipe.errors import RunError
from vpipe.runtime.activations import Record
from vpipe.runtime.microbatches import Segment
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.values import HELD, bytes_of, sizes_of
from vpipe.runtime.worker import Worker
from vpipe.schedules.kinds import GATHERED, KEPT, Action, Kind, Needed, Value
from vpipe.schedules.trace import RecordedAction, RecordedEvaluation

MOST_ACTIONS = 100_000
"""Most actions that are recorded per rank: about 7 MB in its file."""


_Part = tuple[int, int, Kind | Value]
"""What is held of a microbatch: stage, slice, and the action after which its record is so, or that it is KEPT."""


class _Microbatch:
    """The bytes of the storages that a rank holds of a microbatch, or of an equal one before it.

    Attributes:
        shape: equal for equal microbatches.
        counted: whether it is this one itself.
        parts: the storages of each part; a field's is named with its slice, since its storage is that of the batch.
    """

    def __init__(self, shape: Hashable) -> None:
        self.shape, self.counted = shape, True
        self.parts: dict[_Part, Mapping[Hashable, int]] = {}
        self._fields: dict[StorageWeakRef, int] = {}
        self._sums: dict[frozenset[_Part], int] = {}

    def count(self, part: _Part, entry: Record | Mapping[str, Tensor]) -> None:
        """Take note of what a part, an entry of the rank's values, holds."""
        storages, fields = (entry.storages(), entry.fields) if isinstance(entry, Record) else (
            sizes_of(entry.values()), {})
        for field in fields.values():
            self._fields |= {storage: min(field.nbytes, size) for storage, size in sizes_of([field]).items()}
        self.parts[part] = {(storage, part[1]) if storage in self._fields else storage:
                            self._fields.get(storage, size) for storage, size in storages.items()}
        self._sums.clear()

    def bytes(self, held: frozenset[_Part]) -> int:
        """Return the bytes of some parts: of every storage once."""
        if held not in self._sums:
            self._sums[held] = sum({storage: size for part in held for storage, size in self.parts[part].items()
                                    }.values())
        return self._sums[held]


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

    The bytes that a rank holds are those of the distinct storages of :data:`~vpipe.runtime.values.HELD`. What graphs
    save is counted until one microbatch of every shape is done; later ones hold as much. Nothing is recorded while
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
        self._segment: Segment | None = None
        self._in_flight: dict[int, _Microbatch] = {}  # by number within the segment
        self._parts: dict[Needed, _Part] = {}  # of what is held
        self._done: dict[Hashable, _Microbatch] = {}  # by shape

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
        transport, waits = worker.transport, list[tuple[torch.Event, torch.Event]]()
        if self._device_times is not None and transport.ordered:  # else the host waits
            transport.device_waits = waits
        waited, started = transport.wait_s, self._now()
        try:
            if op.uses_version:
                worker.stages[stage].counted = self._begin(stage, index)
            run()
        except RunError as error:
            if "saved tensor hooks" in error.what:
                error.hint = "what such a layer keeps cannot be counted for the timeline of the run: set trace to false"
            raise
        finally:
            transport.device_waits = None
            if op.uses_version:
                worker.stages[stage].counted = False
        ended, waited = started if op.chooses else self._now(), transport.wait_s - waited
        if op.memory is not None and GATHERED in op.memory.takes:
            leaves = worker.stages[stage].weights.leaves()  # they stand in place of the parts of static bytes
            own = sum(local(leaf).nbytes for leaf in worker.fully_sharded.divided[stage])
            self._gathered[stage] = 2 * sum(leaf.nbytes for leaf in leaves) - own  # with their gradients
        elif op.memory is not None and GATHERED in op.memory.frees:
            del self._gathered[stage]
        if (held := self._held_bytes(op, stage, index)) is None:
            return
        self.count += 1
        here = worker.stages.get(stage)
        self._records.append((op, stage, worker.segment.number_of(action), started, ended,
                              waited if self._device_times is None else (waited, waits),
                              sum(self._gathered.values()) + held, 0 if here is None else here.weights.version_count))

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

    def _begin(self, stage: int, index: int) -> bool:
        """Begin with a microbatch at its first forward on the rank; return whether its forwards are counted."""
        worker, segment, assignment = self.worker, self.worker.segment, self.worker.segment.assignment
        number = assignment.whole(index)
        if segment is not self._segment:
            self._segment = segment
            self._in_flight.clear()
            self._parts.clear()
        if (stages := self._stages_of(index))[0] == stage and not assignment.continues(index):
            shape = tuple((segment.loader.signature(segment.first + each), own, worker.is_split(own, each))
                          for each in range(index, assignment.indices(number + 1)) for own in stages)
            self._in_flight[number] = self._done.get(shape) or _Microbatch(shape)
        return number in self._in_flight and self._in_flight[number].counted

    def _stages_of(self, index: int) -> list[int]:
        """Return the stages through which the rank takes a microbatch."""
        rank_of = self.worker.segment.assignment.rank_of
        return [stage for stage in self.worker.stages if rank_of(stage, index) == self.worker.rank]

    def _held_bytes(self, op: Kind, stage: int, index: int) -> int | None:
        """Return the bytes that the rank holds after an action; None where it holds what the recorder does not know."""
        assignment, held, known = self.worker.segment.assignment, defaultdict[int, set[_Part]](set), True
        changes = op.per_microbatch and op.memory is not None
        before = [self._parts.pop((value, stage, index), None) for value in HELD if changes]
        for key, entry in self.worker.values.items():
            value, own, each = key
            if value in HELD:
                part = each - assignment.indices(number := assignment.whole(each))
                if changes and each == index and key not in self._parts and number in self._in_flight:
                    new, microbatch = (own, part, KEPT if value is KEPT else op), self._in_flight[number]
                    if microbatch.counted:
                        microbatch.count(new, entry)
                    # An op that the counted one did not have is an R in a stage that recomputes nothing.
                    self._parts[key] = new if new in microbatch.parts else next(filter(None, before))
                if key in self._parts:
                    held[number].add(self._parts[key])
                known &= key in self._parts
        number = assignment.whole(index)
        if changes and number in self._in_flight and number not in held and (
                op.completes or not assignment.trains(self._stages_of(index)[-1])):
            done = self._in_flight.pop(number)
            # Where some are offloaded not all go the same way.
            if not (self.worker.passing or any(each.offloaded for each in self.worker.stages.values())):
                done.counted = False
                self._done[done.shape] = done
        return sum(self._in_flight[number].bytes(frozenset(parts)) for number, parts in held.items()) if known else None


def labelled(worker: Worker, action: Action, run: Callable[[], None]) -> None:
    """Execute an action under a label for torch's profiler: its text form with the run's number, such as ``0F3``."""
    with record_function(f"{action.stage}{action.op}{worker.segment.number_of(action)}"):
        run()
