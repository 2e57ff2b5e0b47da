"""Make the loaders of microbatches for the stages of a process, learn how much labels count, and end the loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from vpipe import accelerator
from vpipe.description import Description
from vpipe.distributed.device import DeviceMap
from vpipe.distributed.init import exchange
from vpipe.errors import RunError
from vpipe.model.model import Model
from vpipe.runtime.collectives import Collectives
from vpipe.runtime.label_weights import CLASSES_ALIKE, ClassWeights, LossCheck, Weigh
from vpipe.runtime.microbatches import Batch, BatchComparison, BatchForm, LabelCount, MicrobatchLoader
from vpipe.runtime.slices import check_slices
from vpipe.runtime.stage import Stage
from vpipe.runtime.worker import Worker
from vpipe.schedules.schedule import Schedule

_made_here = count()


class Loaders:
    """Make loaders, for training and for evaluations.

    Args:
        workers: of this process, by rank, once they are built.

    Attributes:
        number: of the pipeline among those of the job, on all ranks the same.
        comparison: of the batches with those of other ranks.
        labels: the field by whose labels an evaluation counts microbatches; None where these count by their samples.

    Raises:
        UserError: labels are to count in training, but the model names none; or a microbatch cannot be cut into slices.
    """

    def __init__(self, model: Model, schedule: Schedule, description: Description, world: DeviceMap,
                 workers: Mapping[int, Worker], collectives: Collectives) -> None:
        check_slices(model, description, schedule.slices)
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
            training: all microbatches of a batch must have the same size, and are cut into slices.
        """
        here = [(stage, rank) for rank, worker in self._workers.items() for stage in worker.stages.values()]
        last = [stage for stage, _ in here if stage.spec.index == len(self._schedule.placement) - 1]
        slices = self._schedule.slices if training else 1
        assignment = replace(self._schedule.assignment, slices=slices)

        def uses(microbatch: int) -> int:
            number = microbatch - begun if period is None else microbatch % period
            return 0 if number < 0 else sum(assignment.rank_of(each.spec.index, number) == rank for each, rank in here)

        used = {name for stage, _ in here for name in stage.spec.fields}
        counted = self._counted if training and slices == 1 else self.labels
        weigh = CLASSES_ALIKE if counted is None else self._weigh(counted, last, training)
        if not training and not last:
            counted = None  # the last stage has them
        labels = None if counted is None else LabelCount(counted, weigh, self._collectives.over_lanes if training else
                                                         list, not training or self._counted is not None)
        self.comparison.take()  # what another loader read and was not told of, since that was interrupted
        return MicrobatchLoader(
            batches, BatchForm(self._model.batch, self._microbatches, slices, training, self._model.unread),
            uses, used, self._device if self._schedule.stream or not training else None, labels,
            self.comparison if self._collectives.job.ranks > 1 else None, read)

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
