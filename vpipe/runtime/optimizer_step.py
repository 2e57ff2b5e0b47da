"""Optimizer steps of the stages of one rank: complete gradients, clip them, skip overflows, make the next version."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from vpipe.description.update import Update
from vpipe.distributed.watchdog import watch
from vpipe.runtime.delay_correction import Extrapolation
from vpipe.runtime.loss_scaler import LossScaler
from vpipe.runtime.microbatches import Segment
from vpipe.runtime.reducer import Reducer
from vpipe.runtime.sharded_tensors import any_of_all, local, norms_of
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.tied_weights import TiedWeights
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind, Transport
from vpipe.runtime.weight_versions import WeightVersions
from vpipe.schedules.size import Placement

ABSENT = -1.0
"""Norm of a parameter without a gradient, in the vector of norms: no norm is negative."""


class StepObserver(Protocol):
    """Observe every update of a stage, for comparison with a reference."""

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        """Observe the gradients before clipping."""

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """Observe the unrounded weights after the update; the tensors change later."""


class OptimizerSteps:
    """Carry out REDUCE, NORM, STEP and USE of a rank; updates and versions are numbered within the segment.

    Args:
        placement: ranks per stage.
        stages: of this rank.
        optimizers: per stage of this rank.
        tied: weights of this rank that other stages share.
        transport: of this rank.
        update: what limits a gradient, and the learning rate. With a scaler an update with a norm that is not finite
            is always skipped.
        scaler: of the losses; None: they are not scaled.
        extrapolations: of the stages whose late gradients are corrected.

    Attributes:
        reducers: of the stages with replicas.
        gradient_norm: of all stages at the latest update, before clipping; None when not clipped globally.
        skipped: steps of which an update was skipped.
    """

    def __init__(self, placement: Placement, stages: Mapping[int, Stage], optimizers: Mapping[int, StageOptimizer],
                 tied: TiedWeights, transport: Transport, update: Update, scaler: LossScaler | None,
                 extrapolations: Mapping[int, Extrapolation]) -> None:
        self.optimizers, self.skip, self.scaler = optimizers, update.skip_not_finite, scaler
        self.extrapolations, self._update = extrapolations, update
        self._stages, self._tied, self._transport = stages, tied, transport
        self.reducers = {s: Reducer(s, stage.weights, stage.summed_late, placement[s], transport, self.stage_scaler)
                         for s, stage in stages.items() if len(placement[s]) > 1}
        self.skipped: set[int] = set()
        self.observer: StepObserver | None = None
        self._completed: Counter[int] = Counter()  # by replicated stage: backwards of the update at hand
        self.gradient_norm: Tensor | None = None
        self.global_norms = False
        self._others: dict[int, tuple[int, int]] = {}  # stages elsewhere: their rank, and how many norms they publish
        self._audience: Mapping[int, Sequence[int]] = {}
        self._norms: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by update and stage, own and others'
        self._steps: Counter[int] = Counter()  # of own stages, by update

    @property
    def stage_scaler(self) -> LossScaler | None:
        """Return the scaler of losses where stages differ in their scales; None elsewhere."""
        return self.scaler if self.scaler is not None and self.scaler.per_stage else None

    def use_global_norms(self, others: Mapping[int, tuple[int, int]], audience: Mapping[int, Sequence[int]]) -> None:
        """Clip, and skip, by the norms of all stages, as a schedule with a flush can.

        Args:
            others: per stage that is not on this rank, the rank that publishes its norms, and how many they are.
            audience: per stage of this rank, the ranks to which this one publishes its norms.
        """
        self.global_norms, self._others, self._audience = True, dict(others), audience

    def begin(self, segment: Segment) -> None:
        """Number updates from the versions that the stages have now."""
        self._segment, self._assignment = segment, segment.assignment
        self._before = {s: stage.weights.latest for s, stage in self._stages.items()}
        # Without a flush a stage with more replicas makes fewer updates, each from more microbatches, at a higher rate.
        # Source: PipeDream's code, which multiplies by the replicas of the stage over those of the first.
        self._rates = {s: 1 if self._assignment.flush else self._assignment.width(s) / self._assignment.width(0)
                       for s in self._stages}
        if not self._assignment.flush:  # stages are at different updates until the pipeline is empty again
            for optimizer in self.optimizers.values():
                optimizer.fix_rates()

    def abandon(self) -> None:
        """Drop an update that failed before a step."""
        for store in (self._completed, self._norms, self._steps):
            store.clear()
        if self.scaler is not None:
            self.scaler.overflowed.clear()
        for reducer in self.reducers.values():
            reducer.abandon()

    # -- gradients -------------------------------------------------------------------------------------

    def completing(self, stage: int, microbatch: int, whole: bool) -> AbstractContextManager[None] | None:
        """Return the context of a replica's last backward of an update, which sends the gradients; None for others.

        Args:
            whole: whether the backward is not in two halves: then gradients are sent as they are made.
        """
        update = self._assignment.update_of(stage, microbatch)
        self._completed[stage] += 1
        if self._completed[stage] < len(self._assignment.share(stage, update, stage, self._transport.rank)):
            return None
        del self._completed[stage]
        return self.reducers[stage].during_backward(
            self._number(stage, update), self._contributors(stage, update),
            early=whole and self.stage_scaler is None)  # not before it is known whether the update overflowed

    def reduce(self, stage: int, update: int) -> None:
        """Sum this replica's share of an update's gradients and send it to the others."""
        self.reducers[stage].reduce(self._number(stage, update), self._contributors(stage, update))

    def _complete_gradients(self, stage: int, update: int) -> None:
        """Add the gradients of all replicas and borrowers; an incomplete update takes the mean of its microbatches."""
        if stage in self.reducers:
            self.reducers[stage].gather(self._number(stage, update))
        weights, count = self._stages[stage].weights, len(self._assignment.in_update(stage, update))
        weights.complete_gradients()
        self._tied.add_gradients(stage, update)
        for position in self.optimizers[stage].untrained:
            weights.graded()[position].grad = None
        weights.widen_gradients()
        if count != self._assignment.update_every:
            weights.scale_gradients(self._assignment.update_every / count)
        if self.scaler is not None:
            weights.scale_gradients(1 / self.scaler[stage].value)

    # -- norms of all stages ---------------------------------------------------------------------------

    def norm(self, stage: int, update: int) -> None:
        """Send the norms of an update's gradients to the ranks without the stage; post the receives of theirs."""
        number = self._number(stage, update)
        self._complete_gradients(stage, update)
        if not self._norms[number]:
            for other, (rank, count) in self._others.items():
                self._transport.post(rank, TransferKey(TransferKind.NORMS, other, number),
                                     [TensorSpec((count,), torch.float64, wants_gradient=False)])
        norms = self._norms[number][stage] = _gradient_norms(self._stages[stage].weights)
        for rank in self._audience[stage]:
            self._transport.send(rank, TransferKey(TransferKind.NORMS, stage, number), [norms])

    def _norms_of_all(self, number: int) -> Tensor:
        """Return the norms of every stage, in their order; received at this rank's first step, dropped at its last."""
        norms = self._norms[number]
        if not self._steps[number]:
            norms |= {other: self._transport.receive(rank, TransferKey(TransferKind.NORMS, other, number))[0].cpu()
                      for other, (rank, _) in self._others.items()}
        self._steps[number] += 1
        if self._steps[number] == len(self.optimizers):
            del self._norms[number], self._steps[number]
        return torch.cat([norms[s] for s in sorted(norms)])

    # -- the step --------------------------------------------------------------------------------------

    def step(self, stage: int, update: int) -> None:
        """Make the next version of a stage's weights."""
        weights, number = self._stages[stage].weights, self._number(stage, update)
        if not self.global_norms:
            self._complete_gradients(stage, update)
        if self.observer is not None:
            self.observer.gradients(number, dict(zip(weights.names, weights.gradients, strict=True)))
        step = update * self._assignment.per_update(stage) // self._assignment.per_step
        applied = self._apply(stage, weights, number, self._rate(stage, step))
        if not applied:
            self.skipped.add(self._segment.steps_before + step)
        if self.scaler is not None:
            factor = self.scaler.update(stage, number, applied)
            for borrowed in self._stages[stage].borrowed.values() if factor != 1 else ():
                borrowed.scale_gradients(factor)
        if self.observer is not None:
            self.observer.weights(number, {name: master.data for name, master in weights.masters.items()})
        watch.activity.rest()  # the caller's code may run next

    def _apply(self, stage: int, weights: WeightVersions, number: int, rate: float) -> bool:
        """Step the optimizers at their own learning rates times ``rate``; return False if the update is skipped.

        A skipped update makes a version that equals the one before; so does the state of the optimizers.
        """
        if self.global_norms or self._update.grad_clip is not None or self.skip or self.scaler is not None:
            norms = self._norms_of_all(number) if self.global_norms else _gradient_norms(weights)
            if self._update.grad_clip is not None:
                self._clip_gradients(weights, norms, self._update.grad_clip)
            scaler = self.stage_scaler
            if (scaler is not None and any_of_all(stage in scaler.overflowed, weights.leaves())) or (
                    (self.skip or self.scaler is not None) and not norms.isfinite().all()):
                weights.pop_gradients()
                weights.step(None)
                return False
        optimizer = self.optimizers[stage]
        optimizer.step_at_rate(rate, partial(weights.step, self.extrapolations.get(stage) or optimizer))
        return True

    def _clip_gradients(self, weights: WeightVersions, norms: Tensor, clip: float) -> None:
        """Clip by the operations of ``torch.nn.utils.clip_grad_norm_``, to get the same numbers."""
        gradients = [local(g) for g in weights.gradients if g is not None]
        dtype = gradients[0].dtype if gradients else torch.float32
        norm = torch.linalg.vector_norm(norms[norms != ABSENT].to(dtype))
        if self.global_norms:
            self.gradient_norm = norm
        if gradients:
            factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
            # Filled in there: a device would be waited for with a copy of the host's.
            torch._foreach_mul_(gradients, factor.new_full((), factor.item(), device=gradients[0].device))

    def _rate(self, stage: int, step: int) -> float:
        """Return the learning rate of a step at a stage, relative to the optimizer's own."""
        return self._update.factor(self._segment.steps_before + step) * self._rates[stage]

    def learning_rate(self, stage: int, step: int) -> float | None:
        """Return the learning rate of the stage's first parameter group; None where nothing is trained."""
        rate = self.optimizers[stage].learning_rate
        return None if rate is None else rate * self._rate(stage, step)

    def use(self, stage: int, version: int) -> None:
        """Give the following microbatches this version."""
        self._stages[stage].weights.choose(self._number(stage, version))

    def _contributors(self, stage: int, update: int) -> list[int]:
        """Return the replicas with a microbatch of an update."""
        return self._assignment.contributors(stage, update, stage)

    def _number(self, stage: int, update: int) -> int:
        """Return the run's number of an update, or version, of a stage."""
        return self._before[stage] + update


def _gradient_norms(weights: WeightVersions) -> Tensor:
    """Return the norm of each gradient, in double precision, which holds any of them exactly."""
    values = iter(norms_of([g for g in weights.gradients if g is not None]).tolist())
    return torch.tensor([ABSENT if g is None else next(values) for g in weights.gradients], dtype=torch.float64)
