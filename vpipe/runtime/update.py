"""The optimizer step of the stages of one rank: learning rate, clipping, the step itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vpipe.runtime.scaling import Scaling
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.transport import Key, Spec, Transport
from vpipe.runtime.weights import Weights

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
