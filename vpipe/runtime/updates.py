"""The updates of a rank's stages: from the backward that completes their gradients to the step that applies them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from vpipe.runtime.reduce import Reduction
from vpipe.runtime.segment import Segment
from vpipe.runtime.stage import Stage
from vpipe.runtime.tied import TiedWeights
from vpipe.runtime.transport import Key, Transport
from vpipe.runtime.update import Update
from vpipe.schedules.action import Action, Op
from vpipe.schedules.size import Placement
from vpipe.watch.current import work


class Observer(Protocol):
    """Sees what every update does to a stage: for comparison with an oracle."""

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        """The gradients about to be applied, before clipping."""

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """The weights that the update made, unrounded; they must not be kept but as copies."""


class Updates:
    """Carries out those actions of a rank that are about an update, which they number within the segment.

    Args:
        update: how each is made.
        factor: tells the learning rate of a step, relative to the optimizer's own.

    Attributes:
        skipped: steps of which an update was left out.
        observer: sees every update, if there is one.
    """

    def __init__(self, rank: int, placement: Placement, stages: Mapping[int, Stage], update: Update, tied: TiedWeights,
                 transport: Transport, factor: Callable[[int], float]) -> None:
        self._rank, self._stages, self._update, self._tied = rank, stages, update, tied
        self._transport, self._factor = transport, factor
        self._reductions = {
            s: Reduction(s, stage.weights, stage.summed_late, placement[s], transport, update.own_scales)
            for s, stage in stages.items() if len(placement[s]) > 1}
        self._completed: Counter[int] = Counter()  # by replicated stage: gradients of the update at hand
        self.skipped: set[int] = set()
        self.observer: Observer | None = None

    def begin(self, segment: Segment) -> None:
        """What the following actions are about."""
        self._segment, self._rounds = segment, segment.rounds
        self._before = {s: stage.weights.latest for s, stage in self._stages.items()}
        if not self._rounds.flush:  # stages are at different updates until the pipeline is empty again
            for optimizer in self._update.optimizers.values():
                optimizer.fix_rates()

    def abandon(self) -> None:
        """Drop what is there of an update that failed before a step."""
        self._completed.clear()
        self._update.abandon()
        for reduction in self._reductions.values():
            reduction.abandon()

    def completing(self, stage: int, microbatch: int, whole: bool) -> AbstractContextManager[None]:
        """While weight gradients are made; those of a replica that are its last of an update go out.

        Of a whole backward, as they are made; halves put them aside first.
        """
        reduction = self._reductions.get(stage)
        if reduction is None:
            return nullcontext()
        update = microbatch // self._rounds.span(stage)
        self._completed[stage] += 1
        if self._completed[stage] < len(self._rounds.share(stage, update, stage, self._rank)):
            return nullcontext()
        del self._completed[stage]
        number, contributors = self._number(stage, update), self._contributors(stage, update)
        early = whole and self._update.own_scales is None  # not before it is known whether the update is lost
        sending = reduction.during_backward if early else reduction.after_backward
        return sending(number, contributors)

    def reduce(self, stage: int, update: int) -> None:
        """Sum this replica's share of an update's gradients and send it to the others."""
        self._reductions[stage].add(self._number(stage, update), self._contributors(stage, update))

    def norm(self, stage: int, update: int) -> None:
        """Tell the other ranks the norms of an update's gradients."""
        number = self._number(stage, update)
        self._gather_gradients(stage, update)
        self._update.publish_norms(self._transport, stage, self._stages[stage].weights, number)

    def step(self, stage: int, update: int) -> None:
        """Make the next version of a stage's weights."""
        weights, number = self._stages[stage].weights, self._number(stage, update)
        if not self._update.global_norm:
            self._gather_gradients(stage, update)
        if self.observer is not None:
            self.observer.gradients(number, dict(zip(weights.names, weights.gradients, strict=True)))
        step = update * self._rounds.span(stage) // self._rounds.per_step
        applied = self._update.step(self._transport, stage, weights, number, self._rate(stage, step))
        if not applied:
            self.skipped.add(self._segment.steps_before + step)
        if self._update.scaling is not None:
            factor = self._update.scaling.updated(stage, number, applied)
            for borrowed in self._stages[stage].borrowed.values() if factor != 1 else ():
                borrowed.scale_gradients(factor)
        if self.observer is not None:
            self.observer.weights(number, {name: master.data for name, master in weights.masters.items()})
        work.rest()  # what follows a step may be the program that runs the pipeline

    def _gather_gradients(self, stage: int, update: int) -> None:
        """Of all replicas and borrowers; without a flush their mean over the microbatches that there are."""
        if stage in self._reductions:
            self._reductions[stage].collect(self._number(stage, update))
        self._tied.add_gradients(stage, update)
        weights, count = self._stages[stage].weights, len(self._rounds.of_update(stage, update))
        for position in self._update.optimizers[stage].untrained:
            weights.graded()[position].grad = None
        weights.settle()
        if count != self._rounds.update_every:
            weights.scale_gradients(self._rounds.update_every / count)
        if self._update.scaling is not None:
            weights.scale_gradients(1 / self._update.scaling[stage].value)

    def _rate(self, stage: int, step: int) -> float:
        """The learning rate of a step at a stage, relative to the optimizer's own.

        Without a flush a stage with more replicas makes fewer updates, from more microbatches: larger ones, then.
        Source: PipeDream's code, which multiplies by the replicas of the stage over those of the first.
        """
        share = 1 if self._rounds.flush else self._rounds.width(stage) / self._rounds.width(0)
        return self._factor(self._segment.steps_before + step) * share

    def learning_rate(self, stage: int, step: int) -> float | None:
        """Of a step of the segment, in the stage's first parameter group; None where nothing is trained."""
        rate = self._update.optimizers[stage].learning_rate
        return None if rate is None else rate * self._rate(stage, step)

    def use(self, stage: int, version: int) -> None:
        """Give the following microbatches this version."""
        self._stages[stage].weights.choose(self._number(stage, version))

    def needs(self, action: Action) -> Iterator[tuple[int, Key]]:
        """The transfers that an action takes, with the rank they come from."""
        stage, index = action.stage, action.microbatch
        if action.op is Op.REDUCE:
            yield from self._reductions[stage].shares_needed(self._number(stage, index),
                                                             self._contributors(stage, index))
        elif action.op is (Op.NORM if self._update.global_norm else Op.STEP):
            if stage in self._reductions:
                yield from self._reductions[stage].sums_needed(self._number(stage, index))
            yield from self._tied.gradients_needed(stage, index)

    def norms_awaited(self, stage: int, update: int) -> str | None:
        """The norms of other ranks that a step lacks, in words; None when they are there, or it needs none."""
        number = self._number(stage, update)
        return None if self._update.ready(self._transport, number) else f"the gradient norms of update {number}"

    def _contributors(self, stage: int, update: int) -> list[int]:
        """The replicas with a microbatch of an update."""
        return self._rounds.contributors(stage, update, stage)

    def _number(self, stage: int, update: int) -> int:
        """The run's number of an update, or version, of a stage."""
        return self._before[stage] + update
