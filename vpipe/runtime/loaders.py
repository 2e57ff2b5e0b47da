"""Make and end the loaders of microbatches for the stages of a process; compare with other ranks what these read."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any

from vpipe import accelerator
from vpipe.description import Description
from vpipe.distributed.device import DeviceMap
from vpipe.distributed.fault import reason_of
from vpipe.distributed.init import exchange
from vpipe.distributed.read_batches import ReadBatch
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import RunError
from vpipe.model.model import Model
from vpipe.runtime.checksums import checksum
from vpipe.runtime.collectives import Collectives
from vpipe.runtime.label_weights import CLASSES_ALIKE, ClassWeights, LabelCount, LossCheck, Weigh
from vpipe.runtime.microbatches import Batch, BatchForm, MicrobatchLoader
from vpipe.runtime.stage import Stage
from vpipe.runtime.worker import Worker
from vpipe.schedules.schedule import Schedule

_made_here = count()


class BatchComparison:
    """Compare the batches of one rank with those of all others, which read as many.

    With different batches, inputs would be trained with the labels of others. So a rank that reads a batch computes a
    checksum of every field whose values it has, and tells rank 0 before it uses the batch. When two ranks have told
    something different, all fail at once, since one may wait for a transfer of another size than is sent. Before a rank
    makes an update, it waits for the others to have told the same of its batches; as a rule they have by then.

    With a flush, and in evaluations, ranks tell of their batches in the exchange that begins a step
    (:meth:`take`, :meth:`expect`). Without a flush a rank tells of a batch when it reads the batch (:meth:`tell`), in
    an exchange beside that of calls: ranks read ahead of one another there.

    Args:
        exchange: for streams.
        fields: of a batch.
        group: of ranks that read the same batches; others read as many, of as many samples.

    Attributes:
        untold: batches that were read, of which the others are not told yet.
    """

    def __init__(self, exchange: Exchange, fields: Sequence[str], group: int) -> None:
        self._exchange, self._fields, self._group = exchange, fields, group
        self.untold: list[ReadBatch] = []
        self._expected: deque[tuple[int, Callable[[], object]]] = deque()  # by first microbatch, the waits

    def read(self, first: int, number: int, batch: Batch | None, error: BaseException | None) -> None:
        """Describe a batch that was read, from this microbatch of its loader on."""
        samples, fields = 0, {}
        if batch is not None:
            samples = next(iter(batch.values())).shape[0]
            fields = {name: [zlib.crc32(str(tuple(batch[name].shape)).encode()),
                             None if batch[name].is_meta else checksum(batch[name])] for name in self._fields}
        why = "" if error is None else reason_of(error)
        self.untold.append(ReadBatch(number, first, samples, why, self._group, fields))

    def take(self) -> list[ReadBatch]:
        """Return the batches that were read, and that the others are told of now."""
        batches, self.untold = self.untold, []
        return batches

    def expect(self, first: int, all_told: Callable[[], object]) -> None:
        """Let :meth:`confirm` wait until all have told of the batch with this first microbatch."""
        self._expected.append((first, all_told))

    def tell(self, batches: Sequence[ReadBatch]) -> None:
        """Tell the others of batches of a stream. All ranks have read the same ones when a stream is drained."""
        for batch in batches:
            self.expect(batch.first, self._exchange.begin(None, "reading training batches", None, [batch],
                                                          hears="later"))

    def confirm(self, until: float = inf) -> None:
        """Wait until all ranks have told the same of the batches up to a microbatch.

        Raises:
            RunError: they have not, or a rank failed.
        """
        while self._expected and self._expected[0][0] < until:
            self._expected.popleft()[1]()


class Loaders:
    """Make loaders, for training and for evaluations.

    Args:
        workers: of this process, by rank, once they are built.

    Attributes:
        number: of the pipeline among those of the job, on all ranks the same.
        comparison: of the batches with those of other ranks.
        labels: the field by whose labels an evaluation counts microbatches; None where these count by their samples.

    Raises:
        UserError: labels are to count in training, but the model names none; or sequences cannot be cut.
    """

    def __init__(self, model: Model, schedule: Schedule, description: Description, world: DeviceMap,
                 workers: Mapping[int, Worker], collectives: Collectives) -> None:
        self._form = BatchForm.of(model, schedule, description)
        self._model, self._schedule, self._workers, self._collectives = model, schedule, workers, collectives
        self._microbatches, self._device = description.microbatches, world.own
        self._counted, self.labels = description.update.counted_labels(model.labels), model.labels
        self._losses_checked = set[bool]()
        self.number = collectives.job.from_rank(next(_made_here))
        self.comparison = BatchComparison(exchange(f"batches of pipeline {self.number}", collectives.timeout_s),
                                          model.batch, min(world.lanes.alike))

    def make(self, batches: Iterator[Batch], period: int | None, read: Callable[..., Any], begun: int = 0,
             training: bool = True) -> MicrobatchLoader:
        """Return a loader of the microbatches that this process uses.

        Args:
            period: after how many microbatches they are divided among replicas from the first one on, if ever.
            read: calls ``next`` of the batches.
            begun: how many of the first batch are left out.
            training: all microbatches of a batch must have the same size; they are cut as the schedule says.
        """
        here = [(stage, rank) for rank, worker in self._workers.items() for stage in worker.stages.values()]
        last = [stage for stage, _ in here if stage.spec.index == len(self._schedule.placement) - 1]
        form, assignment = self._form if training else self._form.of_evaluations, self._schedule.assignment

        def uses(microbatch: int) -> int:
            number = microbatch - begun if period is None else microbatch % period
            index = number if training else assignment.indices(number)
            return 0 if number < 0 else sum(assignment.rank_of(each.spec.index, index) == rank for each, rank in here)

        used = {name for stage, _ in here for name in stage.spec.fields}
        counted = self._counted if training and assignment.indices(1) == 1 else self.labels  # parts share by labels
        weigh = CLASSES_ALIKE if counted is None else self._weigh(counted, last, training)
        if not training and not last:
            counted = None  # the last stage has them
        labels = None if counted is None else LabelCount(counted, weigh, self._collectives.over_lanes if training else
                                                         list, not training or self._counted is not None)
        self.comparison.take()  # what another loader read and was not told of, since that was interrupted
        return MicrobatchLoader(
            batches, form, uses, used, self._device if self._schedule.stream or not training else None, labels,
            self.comparison.read if self._collectives.job.ranks > 1 else None, read)

    def end(self, loader: MicrobatchLoader) -> None:
        """Raise the user's error of a batch that could not be read, when the batches before it are done."""
        if not loader.rest:  # else another call may go on
            loader.close()
            if loader.error is not None:
                raise loader.error
        if self._device.type != "cpu" and any(worker.transport.ordered for worker in self._workers.values()):
            accelerator.current_stream(self._device).synchronize()  # the process may end now, before its sends have

    def agree_on_end(self, loader: MicrobatchLoader) -> None:
        """Check that the batches end on every rank alike, if they end before a limit and a pause."""
        try:
            if loader.ended:
                self.comparison.confirm()
        except RunError as error:
            if loader.error is None or loader.error is error:
                raise
            raise loader.error from error

    def _weigh(self, labels: str, last: Sequence[Stage], training: bool) -> Weigh:
        """Return how much each label counts, as the model says, or now its loss; let the first losses be checked."""
        if self._model.label_weights is not None:
            return self._model.label_weights
        found = next((ClassWeights.of_module(stage.modules[stage.spec.layers[-1]]) for stage in last), None)
        told = self._collectives.exchange.from_rank(vars(found or CLASSES_ALIKE), self._schedule.placement[-1][0])
        weigh = ClassWeights(told["ignore_index"], tuple(told["classes"]))
        for stage in () if training in self._losses_checked else last:
            stage.loss_checks = [LossCheck(labels, weigh) for _ in range(self._microbatches)]
        self._losses_checked.add(training)
        return weigh
