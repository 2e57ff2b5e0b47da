"""Optimizer steps of the stages of one rank: complete gradients, clip them, skip overflows, make the next version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial, reduce
from typing import Protocol

import torch
from torch import Tensor

from vpipe.checkpoint.manifest import View
from vpipe.description.update import Update
from vpipe.distributed.watchdog import watch
from vpipe.runtime.companions import Companion
from vpipe.runtime.microbatches import Segment
from vpipe.runtime.reducer import Reducer
from vpipe.runtime.sharded_tensors import local, norms_of
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.tied_weights import TiedWeights
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind, Transport
from vpipe.runtime.values import bytes_of
from vpipe.runtime.weight_versions import WeightVersions
from vpipe.torch_private import foreach_mul_

ABSENT = -1.0
"""Norm of a parameter without a gradient, in the vector of norms: no norm is negative."""

INITIAL_SCALE = 65536.0
GROWTH_UPDATES = 2000
"""Updates in a row that are applied before the scale doubles."""


class LossScaler:
    """The loss scale of the stages of one rank, so that small gradients of fp16 do not become 0 on their way.

    There is one scale for all stages: from the norms that they exchange with a flush, all stages know whether an update
    is skipped. Without a flush no stage waits for the others, so the scale is fixed, and each stage skips its own
    updates.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; the constants are those of
    :class:`torch.amp.GradScaler`, with a limit.

    Args:
        fixed: the scale, which then does not change; None: it is found while training.

    Attributes:
        good: the number of updates in a row that were applied with the scale.
    """

    def __init__(self, fixed: float | None) -> None:
        self.dynamic = fixed is None
        self.value = INITIAL_SCALE if fixed is None else fixed
        self.good = 0
        self._newest = -1  # update that the scale has followed

    def update(self, number: int, applied: bool) -> None:
        """Grow after many applied updates; shrink after one that was skipped because of an overflow.

        Args:
            number: of the update, which counts once, at the first stage of the rank that makes it.
        """
        if not self.dynamic or number <= self._newest:
            return
        self._newest = number
        self.good = self.good + 1 if applied else 0
        if not applied:
            self.value = max(1.0, self.value / 2)
        elif self.good == GROWTH_UPDATES:
            self.value, self.good = min(2.0**24, 2 * self.value), 0


class StepObserver(Protocol):
    """Observe every update of a stage, for comparison with a reference."""

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        """Observe the gradients before clipping, of the parameters that this replica steps."""

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """Observe the unrounded weights after the update; the tensors change later."""


class OptimizerSteps:
    """Carry out REDUCE, NORM, STEP and USE of a rank; updates and versions are numbered within the segment.

    Args:
        stages: of this rank.
        optimizers: per stage of this rank.
        reducers: of the stages with replicas.
        tied: weights of this rank that other stages share.
        transport: of this rank.
        update: what limits a gradient, and the learning rate. With a scaler an update with a norm that is not finite
            is always skipped.
        scaler: of the losses; None: they are not scaled.
        companions: per stage of this rank, by the view that they give, in the order in which they follow an update.

    Attributes:
        gradient_norm: of all stages at the latest update, before clipping; None when not clipped globally.
        norms: by stage of this rank, of each gradient of its latest update, before clipping, where norms
            are computed.
        stepping: the context of a step, given what marks the state before; where it gives False, no step is made.
        skipped: steps of which an update was skipped.
        norm_dtypes: by stage of this rank, in which the norms by which it clips are added up.
    """

    def __init__(self, stages: Mapping[int, Stage], optimizers: Mapping[int, StageOptimizer],
                 reducers: Mapping[int, Reducer], tied: TiedWeights, transport: Transport, update: Update,
                 scaler: LossScaler | None, companions: Mapping[int, Mapping[View, Companion]]) -> None:
        self.optimizers, self.skip, self.scaler = optimizers, update.skip_not_finite, scaler
        self.companions, self._update = companions, update
        self._uses_norms = update.grad_clip is not None or self.skip or scaler is not None
        self.factor = lru_cache(update.factor)  # asked for by every stage
        self._stages, self.reducers, self._tied, self._transport = stages, reducers, tied, transport
        self._sources: Mapping[int, Mapping[int, Sequence[int]]] = {}
        self._audience: Mapping[int, Sequence[int]] = {}
        self.skipped: set[int] = set()
        self.observer: StepObserver | None = None
        self.stepping: Callable[[Callable[[], Callable[[], bool]]], AbstractContextManager[bool]]
        self._completed: Counter[int] = Counter()  # by replicated stage: backwards of the update at hand
        self.gradient_norm: Tensor | None = None
        self.norms: dict[int, Tensor] = {}
        self.global_norms = False
        self.norm_dtypes = {s: reduce(torch.promote_types, {master.dtype for master in stage.weights.masters.values()})
                            for s, stage in stages.items() if stage.weights.names}
        # Of the update at hand, of all stages (-1) or of each: norms by stage, own and others'; what is to arrive: a
        # stage, one of its ranks, and the positions of the parameters.
        self._norms: dict[int, dict[int, Tensor]] = {}
        self._awaited: dict[int, Sequence[tuple[int, int, Sequence[int]]]] = {}

    def use_norms_of_others(self, sources: Mapping[int, Mapping[int, Sequence[int]]],
                            audience: Mapping[int, Sequence[int]], dtype: torch.dtype | None) -> None:
        """Clip, and skip, by norms that other ranks have, too.

        Args:
            sources: per stage, the ranks that publish norms to this one, each with the positions of the parameters.
            audience: per stage of this rank, the ranks to which this one publishes its norms.
            dtype: the widest of all parameters that are trained, where an update has one norm over all stages, as a
                schedule with a flush can; None: each stage has its own.
        """
        self._sources, self._audience = sources, audience
        if dtype is not None:
            self.global_norms, self.norm_dtypes = True, dict.fromkeys(self._stages, dtype)

    def owned(self, stage: int) -> list[int]:
        """Return the positions of the parameters of a stage that this rank steps."""
        weights = self._stages[stage].weights
        return [i for i, name in enumerate(weights.names) if weights.owns(name)]

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
        """Drop an update that failed before a step, or in one that has changed nothing."""
        for store in (self._completed, self._norms, self._awaited):
            store.clear()
        for reducer in self.reducers.values():
            reducer.abandon()
        for stage, version in self._before.items():
            self._stages[stage].weights.unmake(version)

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
            self._number(stage, update), self._assignment.contributors(stage, update, stage), early=whole)

    def reduce(self, stage: int, update: int) -> None:
        """Sum this replica's share of an update's gradients and send it to the others."""
        self.reducers[stage].reduce(self._number(stage, update), self._assignment.contributors(stage, update, stage))

    def _complete_gradients(self, stage: int, update: int) -> None:
        """Add the gradients of all replicas and borrowers, and divide them by what an update has, where the losses were
        not: the microbatches of an incomplete one, or without a flush its labels."""
        if stage in self.reducers:
            self.reducers[stage].gather(self._number(stage, update))
        weights, assignment = self._stages[stage].weights, self._assignment
        weights.complete_gradients()
        self._tied.add_gradients(stage, update)
        for position in self.optimizers[stage].untrained:
            weights.graded()[position].grad = None
        weights.widen_gradients()
        there = self._segment.total_weight(assignment.in_update(stage, update), lanes=1)
        known_ahead = assignment.flush and self._segment.loader.labels is not None
        if there != assignment.update_every and not known_ahead:
            weights.scale_gradients(assignment.update_every / there)
        if self.scaler is not None:
            weights.scale_gradients(1 / self.scaler.value)

    # -- norms of all stages ---------------------------------------------------------------------------

    def norm(self, stage: int, update: int) -> None:
        """Send the norms of an update's gradients to the ranks that lack them; post the receives of theirs."""
        number, weights, group = self._number(stage, update), self._stages[stage].weights, self._norm_group(stage)
        self._complete_gradients(stage, update)
        norms = self._norms.get(group, {})
        if not norms or stage in norms:  # of the update before
            norms = self._norms[group] = {}
            self._awaited[group] = [
                (other, rank, positions) for other, ranks in self._sources.items()
                if self.global_norms or other == stage for rank, positions in ranks.items() if positions]
            for other, rank, positions in self._awaited[group]:
                self._transport.post(rank, TransferKey(TransferKind.NORMS, other, number),
                                     [TensorSpec((len(positions),), torch.float64, wants_gradient=False)])
        norms[stage] = _gradient_norms(weights)
        if own := self.owned(stage):
            for rank in self._audience[stage]:
                self._transport.send(rank, TransferKey(TransferKind.NORMS, stage, number), [norms[stage][own]])

    def _norm_group(self, stage: int) -> int:
        return -1 if self.global_norms else stage

    def _norms_before(self, stage: int, number: int) -> Mapping[int, Tensor]:
        """Return the norms by which a stage steps, by stage; received at a rank's first step."""
        norms = self._norms[self._norm_group(stage)]
        for other, rank, positions in self._awaited.pop(self._norm_group(stage), ()):
            if other not in norms:
                count = sum(map(len, self._sources[other].values()))
                norms[other] = torch.empty(count, dtype=torch.float64, device="cpu")
            norms[other][positions] = self._transport.receive(
                rank, TransferKey(TransferKind.NORMS, other, number))[0].cpu()
        return norms

    # -- the step --------------------------------------------------------------------------------------

    def step(self, stage: int, update: int) -> None:
        """Make the next version of a stage's weights."""
        weights, number = self._stages[stage].weights, self._number(stage, update)
        norms = None
        if not self._norms_come_first(stage):
            self._complete_gradients(stage, update)
        elif self._uses_norms:
            norms = self._norms_before(stage, number)
        step = update * self._assignment.per_update(stage) // self._assignment.per_step
        with self.stepping(self.optimizers[stage].mark) as may_step:  # all that others send has arrived
            if not may_step:
                return
            if self.observer is not None:
                self.observer.gradients(number, {
                    name: gradient for name, gradient in zip(weights.names, weights.gradients, strict=True)
                    if weights.owns(name)})
            applied = self._apply(stage, weights, norms, self._rate(stage, step))
        if not applied:
            self.skipped.add(self._segment.steps_before + step)
        if self.scaler is not None:
            self.scaler.update(number, applied)
        if self.observer is not None:
            self.observer.weights(number, {name: master.data for name, master in weights.masters.items()
                                           if weights.owns(name)})
        if weights.owned is not None and not self._assignment.flush:
            self.reducers[stage].send_weights(number)
        watch.activity.rest()  # the caller's code may run next

    def gather(self, stage: int, update: int) -> None:
        """Complete the new version by the weights that other replicas have stepped; with a flush that is done when the
        next batch begins, since a script may change them first."""
        if not self._assignment.flush:
            self.reducers[stage].gather_weights(self._number(stage, update))

    def _norms_come_first(self, stage: int) -> bool:
        """Return whether an action NORM has completed the gradients before the step."""
        return self.global_norms or (self._uses_norms and self._stages[stage].weights.owned is not None)

    def _apply(self, stage: int, weights: WeightVersions, of_stage: Mapping[int, Tensor] | None, rate: float) -> bool:
        """Step the optimizers at their own learning rates times ``rate``; return False if the update is skipped.

        A skipped update makes a version that equals the one before; so does the state of the optimizers.
        """
        if self._uses_norms:
            of_stage = of_stage or {stage: _gradient_norms(weights)}
            self.norms[stage] = of_stage[stage]
            norms = torch.cat([of_stage[s] for s in sorted(of_stage)])
            if self._update.grad_clip is not None:
                self._clip_gradients(weights, norms, self._update.grad_clip, self.norm_dtypes.get(stage))
            if (self.skip or self.scaler is not None) and not norms.isfinite().all():
                weights.pop_gradients()
                weights.step(None)
                return False
        change: Callable[[], None] = self.optimizers[stage].step
        for companion in self.companions[stage].values():
            if companion.values:  # else other replicas, or none, step what it would follow
                change = partial(companion.follow, change)
        self.optimizers[stage].step_at_rate(rate, partial(weights.step, change))
        return True

    def _clip_gradients(self, weights: WeightVersions, norms: Tensor, clip: float, dtype: torch.dtype | None) -> None:
        """Clip by the operations of ``torch.nn.utils.clip_grad_norm_``, to get the same numbers."""
        gradients = [local(g) for g in weights.gradients if g is not None]
        norm = torch.linalg.vector_norm(norms[norms != ABSENT].to(dtype or torch.float32))
        if self.global_norms:
            self.gradient_norm = norm
        if gradients:
            factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
            # Filled in there: a device would be waited for with a copy of the host's.
            foreach_mul_(gradients, factor.new_full((), factor.item(), device=gradients[0].device))

    def _rate(self, stage: int, step: int) -> float:
        """Return the learning rate of a step at a stage, relative to the optimizer's own."""
        return self.factor(self._segment.steps_before + step) * self._rates[stage]

    def learning_rate(self, stage: int, step: int) -> float | None:
        """Return the learning rate of the stage's first parameter group; None where nothing is trained."""
        rate = self.optimizers[stage].learning_rate
        return None if rate is None else rate * self._rate(stage, step)

    def state_bytes(self, stage: int) -> int:
        """Return the bytes of an optimizer's present state, of masters of rounded weights, and of companions."""
        here = self._stages[stage]
        return bytes_of((
            *self.optimizers[stage].state_tensors(), *(here.weights.masters.values() if here.precision.pure else ()),
            *(value for companion in self.companions[stage].values() for value in companion.values.values())))

    def use(self, stage: int, version: int) -> None:
        """Give the following microbatches this version."""
        self._stages[stage].weights.choose(self._number(stage, version))

    def _number(self, stage: int, update: int) -> int:
        """Return the run's number of an update, or version, of a stage."""
        return self._before[stage] + update


def _gradient_norms(weights: WeightVersions) -> Tensor:
    """Return the norm of each gradient, in double precision, which holds any of them exactly."""
    values = iter(norms_of([g for g in weights.gradients if g is not None]).tolist())
    return torch.tensor([ABSENT if g is None else next(values) for g in weights.gradients], dtype=torch.float64,
                        device="cpu")
