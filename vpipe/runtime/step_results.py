"""Broadcast the results of each step, losses and the stop flag, from the last stage to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from vpipe.distributed.lanes import Lanes
from vpipe.distributed.value_exchange import Exchange
from vpipe.runtime.microbatches import Segment
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind
from vpipe.runtime.values import LOSS
from vpipe.runtime.worker import Worker
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Step:
    """One optimizer step; with replicas and no flush, the fewest updates that are complete on every stage.

    Attributes:
        index: from 0.
        loss: mean over its microbatches, or their labels where these count, on every rank.
        learning_rate: of the first parameter group of this process's first stage that trains, with
            ``learning_rate_factor``; None without.
        gradient_norm: of all stages, before clipping; None when not clipped globally.
        stop: whether training should stop, as the rank of the last stage says.
        skipped: whether an update was skipped, since a loss or a gradient was not finite: with a flush on all stages,
            without one on a stage of this process.
        not_finite: its first microbatch, counted over all training, whose loss is not finite; None without one.
    """

    index: int
    loss: float
    learning_rate: float | None
    gradient_norm: float | None
    stop: bool
    skipped: bool = False
    not_finite: int | None = None


def read_at_once(numbers: Sequence[Tensor]) -> list[float]:
    """Return numbers of a device, for all of which it is waited for once."""
    if not numbers or numbers[0].device.type == "cpu":
        return [float(number) for number in numbers]
    read: list[float] = torch.stack([number.double().reshape(()) for number in numbers]).tolist()
    return read


class StepResults:
    """Send and receive losses and the stop flag, for the ranks of this process.

    Each replica of the last stage sends the losses of its microbatches; every rank puts them in order, so that all
    have the same mean. The first replica sends the stop flag.

    Args:
        across_lanes: the exchange between the ranks with the same place in all lanes.

    Attributes:
        stop: called once per step on the rank of the last stage.
        last_forwards: by rank, the last forward of a batch, where a program is one update. The losses are then sent at
            once, long before the update: they arrive everywhere before the last backward, so no rank waits for another
            between two updates. Empty where losses are sent with the step.
    """

    def __init__(self, workers: Mapping[int, Worker], schedule: Schedule, distributed: bool, lanes: Lanes,
                 across_lanes: Exchange) -> None:
        self._workers, self._sources, self._lanes = workers, schedule.placement[-1], lanes
        self._listeners = range(schedule.ranks if distributed else 0)
        self._last_stage, self._across_lanes = schedule.stages - 1, across_lanes
        # Reading a loss waits for the GPU; so it is read when the whole batch has been queued.
        self._on_gpu = any(stage.device.type != "cpu" for worker in workers.values()
                           for stage in worker.stages.values())
        self.stop: Callable[[], bool] = lambda: False
        self.last_forwards = self._last_forwards(schedule)
        self._own: dict[tuple[int, int], list[float]] = {}  # by step and rank of the last stage, where that is here
        self._steps = [(stage, workers[rank].optimizer_steps) for stage, rank in sorted(
            (stage, rank) for rank, worker in workers.items() for stage in worker.stages)]

    def post(self, segment: Segment, step: int) -> None:
        """Post the receives of a step's results."""
        for rank in self._sources:
            if rank not in self._workers:
                count = 1 + len(self._share(segment, step, rank))
                self._worker.transport.post(rank, self._key(segment, step),
                                            [TensorSpec((count,), torch.float64, wants_gradient=False)])

    def send(self, segment: Segment, step: int, rank: int) -> None:
        """Send the results of a step to all others, if the last stage is on this rank."""
        if rank not in self._sources:
            return
        values = self._workers[rank].values
        losses = [values[LOSS, self._last_stage, i] for i in self._share(segment, step, rank)]
        stop = float(rank == self._sources[0] and self.stop())
        own = self._own[step, rank] = [stop, *read_at_once(losses)]
        for peer in self._listeners:
            if peer != rank:
                self._worker.transport.send(peer, self._key(segment, step), [
                    torch.tensor(own, dtype=torch.float64, device="cpu")])

    def collect(self, segment: Segment, step: int) -> Step:
        """Return the results of a step whose updates this process has all made."""
        number = segment.steps_before + step
        microbatches = segment.assignment.in_step(step)
        segment.confirm(segment.first + microbatches.stop)  # also where no stage steps
        if not self.last_forwards:
            self.post(segment, step)
            for rank in self._workers:
                self.send(segment, step, rank)
        loss, stop, not_finite = self._receive_results(segment, step, microbatches)
        if self._lanes.count > 1:  # each asks whether to stop; the first decides for all
            of_all = self._across_lanes.all_gather([loss, stop, not_finite])
            own = [of_all[lane] for lane in self._lanes.averaged]
            loss, stop = sum(one for one, _, _ in own), of_all[0][1]
            not_finite = next((one for _, _, one in own if one is not None), None)
        if segment.loader.labels is None:
            loss /= len(self._lanes.averaged)
        else:
            loss /= segment.total_weight(microbatches, len(self._lanes.averaged))
            for microbatch in microbatches:
                del segment.loader.counts[segment.first + microbatch]
        norm = self._steps[0][1].gradient_norm
        # Computed here: within one process a later stage may already have set the rate of its next update.
        given_up = any(worker.passing for worker in self._workers.values())  # the user's factor may be why
        rate = next((rate for stage, steps in self._steps
                     if not given_up and (rate := steps.learning_rate(stage, step)) is not None), None)
        skipped = False
        for _, steps in self._steps:
            if number in steps.skipped:
                skipped = True
                steps.skipped.discard(number)
        return Step(number, loss, rate, None if norm is None else float(norm), stop, skipped, not_finite)

    def _receive_results(self, segment: Segment, step: int, microbatches: range) -> tuple[float, bool, int | None]:
        """Return a step's mean loss, or the sum over labels where they count, whether to stop, and the first microbatch
        whose loss is not finite."""
        results = [self._own.pop((step, rank)) if rank in self._workers
                   else self._worker.transport.receive(rank, self._key(segment, step))[0].tolist()
                   for rank in self._sources]
        for rank in self._sources:
            if rank in self._workers:
                for i in self._share(segment, step, rank):
                    del self._workers[rank].values[LOSS, self._last_stage, i]
        losses = self._in_order([each[1:] for each in results], microbatches, segment.assignment)
        if segment.loader.labels is not None:  # a mean over no labels, which counts for nothing, is NaN
            losses = [each * weight if (weight := segment.weight(i)) else 0.0
                      for i, each in zip(microbatches, losses, strict=True)]
            loss = sum(losses)
        else:
            loss = losses[0] if len(losses) == 1 else float(
                torch.tensor(losses, dtype=torch.float64, device="cpu").mean())
        not_finite = None
        if not isfinite(loss):
            first = next((i for i, each in zip(microbatches, losses, strict=True) if not isfinite(each)),
                         microbatches[0])
            not_finite = segment.assignment.whole(segment.base + first)
        return loss, bool(results[0][0]), not_finite

    def gather(self, numbers: Mapping[int, Sequence[float]], microbatches: range, assignment: Assignment,
               exchange: Exchange) -> list[float]:
        """Return numbers of an evaluation in the order of its microbatches, on every rank.

        Args:
            numbers: by rank of the last stage in this process.
        """
        of_all = exchange.united({str(rank): own for rank, own in numbers.items()})
        return self._in_order([of_all[str(rank)] for rank in self._sources], microbatches, assignment)

    def _last_forwards(self, schedule: Schedule) -> Mapping[int, Action]:
        if schedule.stream or schedule.assignment.per_step < schedule.microbatches or self._on_gpu:
            return {}
        return {rank: [action for action in schedule.programs[rank]
                       if action.op is Op.FORWARD and action.stage == self._last_stage][-1] for rank in self._sources}

    def _share(self, segment: Segment, step: int, rank: int) -> Sequence[int]:
        """Return the microbatches of a replica of the last stage in a step."""
        return segment.assignment.taken(segment.assignment.in_step(step), self._last_stage, rank)

    def _in_order(self, parts: Sequence[Sequence[float]], microbatches: range, assignment: Assignment) -> list[float]:
        """Return the numbers of the replicas of the last stage in the order of their microbatches."""
        found: dict[int, float] = {}
        for rank, part in zip(self._sources, parts, strict=True):
            found |= zip(assignment.taken(microbatches, self._last_stage, rank), part, strict=True)
        return [found[number] for number in microbatches]

    def _key(self, segment: Segment, step: int) -> TransferKey:
        return TransferKey(TransferKind.LOSSES, self._last_stage, segment.steps_before + step)

    @property
    def _worker(self) -> Worker:
        """Return the only worker of this process, where there are other processes."""
        (worker,) = self._workers.values()
        return worker
