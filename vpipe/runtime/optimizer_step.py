"""The optimizer step of the stages of one rank: learning rate, clipping, the step itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from vpipe.distributed.watchdog import work
from vpipe.runtime.loss_scaler import Scaling
from vpipe.runtime.microbatches import Segment
from vpipe.runtime.reducer import Reduction
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.tied_weights import TiedWeights
from vpipe.runtime.transport.transport import Key, Spec, Transport
from vpipe.runtime.weight_versions import Weights
from vpipe.schedules.action import Action, Op
from vpipe.schedules.size import Placement

ABSENT = -1.0
"""Stands in the vector of norms for a parameter without a gradient: no norm is negative."""


class Update:
    """How the weights of the stages of one rank are updated.

    Args:
        optimizers: per stage of this rank.
        clip: greatest norm of the gradients, or None.
        skip: whether an update with a norm that is not finite is left out.
        scaling: of the losses; with it such an update is left out, too. None: they are not scaled.
    """

    def __init__(self, optimizers: Mapping[int, StageOptimizer], clip: float | None,
                 skip: bool = False, scaling: Scaling | None = None) -> None:
        self.optimizers, self.skip, self.scaling = optimizers, skip, scaling
        self._clip = clip
        self._audience: Mapping[int, Sequence[int]] = {}
        self._others: dict[int, tuple[int, int]] = {}  # stages elsewhere: their rank, and how many norms they publish
        self.global_norm = False
        self.gradient_norm: Tensor | None = None
        self._norms: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by update and stage, own and others'
        self._steps: Counter[int] = Counter()  # of own stages, by update

    @property
    def own_scales(self) -> Scaling | None:
        """The scales of losses, where stages differ in theirs; None elsewhere."""
        return self.scaling if self.scaling is not None and self.scaling.travels else None

    def clip_globally(self, others: Mapping[int, tuple[int, int]], audience: Mapping[int, Sequence[int]]) -> None:
        """Clip, and skip, by the norms of all stages, as a schedule with a flush can.

        Args:
            others: per stage that is not on this rank, the rank that publishes its norms, and how many they are.
            audience: per stage of this rank, the ranks to which this one publishes its norms.
        """
        self.global_norm, self._others, self._audience = True, dict(others), audience

    def abandon(self) -> None:
        """Drop what is there of an update that failed before a step."""
        self._norms.clear()
        self._steps.clear()
        if self.scaling is not None:
            self.scaling.abandon()

    def ready(self, transport: Transport, number: int) -> bool:
        """Whether a step can be taken without waiting for norms."""
        return not self.global_norm or self._steps[number] > 0 or (
            all(stage in self._norms[number] for stage in self.optimizers)
            and all(transport.ready(rank, Key("N", stage, number)) for stage, (rank, _) in self._others.items()))

    def publish_norms(self, transport: Transport, stage: int, weights: Weights, number: int) -> None:
        """Send the norms of a stage's gradients to the ranks without it, and get ready for theirs."""
        if not self._norms[number]:
            for other, (rank, count) in self._others.items():
                transport.post(rank, Key("N", other, number), [Spec((count,), torch.float64, wants_gradient=False)])
        self._norms[number][stage] = _norms(weights)
        for rank in self._audience[stage]:
            transport.send(rank, Key("N", stage, number), [self._norms[number][stage]])

    def step(self, transport: Transport, stage: int, weights: Weights, number: int, factor: float) -> bool:
        """Make the next version of a stage's weights, at the optimizers' own learning rates times ``factor``.

        Returns:
            Whether the gradients were applied. A version that skips them equals the one before, and so does the state
            of the optimizers.
        """
        if self.global_norm or self._clip is not None or self.skip or self.scaling is not None:
            norms = self._norms_of_all(transport, number) if self.global_norm else _norms(weights)
            if self._clip is not None:
                self._scale(weights, norms)
            if self._leaves_out(stage, norms):
                weights.take_gradients()
                weights.step(None)
                return False
        with self.optimizers[stage].at_rate(factor):
            weights.step(self.optimizers[stage])
        return True

    def _leaves_out(self, stage: int, norms: Tensor) -> bool:
        if self.scaling is not None:
            return self.scaling.is_lost(stage) or not norms.isfinite().all()
        return self.skip and not norms.isfinite().all()

    def _norms_of_all(self, transport: Transport, number: int) -> Tensor:
        """The norms of every stage, in their order; taken in at the first step of this rank and let go at its last."""
        norms = self._norms[number]
        if not self._steps[number]:
            norms |= {other: transport.take(rank, Key("N", other, number))[0].cpu()
                      for other, (rank, _) in self._others.items()}
        self._steps[number] += 1
        if self._steps[number] == len(self.optimizers):
            del self._norms[number], self._steps[number]
        return torch.cat([norms[s] for s in sorted(norms)])

    def _scale(self, weights: Weights, norms: Tensor) -> None:
        """Clip, in the operations of ``torch.nn.utils.clip_grad_norm_`` so that the result is the same number."""
        assert self._clip is not None
        gradients = [g for g in weights.gradients if g is not None]
        dtype = gradients[0].dtype if gradients else torch.float32
        norm = torch.linalg.vector_norm(norms[norms != ABSENT].to(dtype))
        if self.global_norm:
            self.gradient_norm = norm
        if gradients:
            torch._foreach_mul_(gradients, torch.clamp(self._clip / (norm + 1e-6), max=1.0).to(gradients[0].device))


def _norms(weights: Weights) -> Tensor:
    """The norm of each gradient, in double precision, which holds any of them exactly."""
    norms = [None if g is None else torch.linalg.vector_norm(g) for g in weights.gradients]
    present = [norm for norm in norms if norm is not None]
    values = iter(torch.stack(present).double().tolist() if present else [])
    return torch.tensor([ABSENT if norm is None else next(values) for norm in norms], dtype=torch.float64)


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
