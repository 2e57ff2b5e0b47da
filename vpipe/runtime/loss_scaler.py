"""Scale the losses of fp16 training, so that small gradients do not become 0 on their way.

With a flush there is one scale for all stages: from the norms that they exchange, all stages know whether an update is
skipped. Without one each stage has its own scale, since no stage waits for the others: a gradient that arrives is
brought from the sender's scale to the receiver's, and an update is skipped where it is not finite. A stage whose own
gradients are finite must also reduce its scale when the gradients that it sends overflow: otherwise the stages before
would skip all their updates.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; the constants are those of
:class:`torch.amp.GradScaler`, with a limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from vpipe.description.precision import Precision
from vpipe.errors import UserError
from vpipe.runtime.stage import Stage
from vpipe.schedules.schedule import Schedule

INITIAL_SCALE = 65536.0
LEAST_SCALE = 1.0
LARGEST_SCALE = 2.0**24
GROWTH_UPDATES = 2000
"""Updates in a row that are applied before the scale doubles."""


class LossScaleState:
    """A loss scale, and the number of updates in a row that were applied with it; it does not change if ``fixed``."""

    def __init__(self, fixed: float | None) -> None:
        self.dynamic = fixed is None
        self.value = INITIAL_SCALE if fixed is None else fixed
        self.good = 0

    def update(self, applied: bool) -> None:
        """Grow after many applied updates; shrink after one that was skipped because of an overflow."""
        if not self.dynamic:
            return
        self.good = self.good + 1 if applied else 0
        if not applied:
            self.value = max(LEAST_SCALE, self.value / 2)
        elif self.good == GROWTH_UPDATES:
            self.value, self.good = min(LARGEST_SCALE, 2 * self.value), 0


class LossScaler:
    """The loss scales of the stages of one rank.

    Attributes:
        per_stage: whether scales differ from stage to stage, and travel with the gradients.
        overflowed: stages that sent gradients that are not finite in the update at hand, or have a replica that did.
    """

    def __init__(self, precision: Precision, stages: Iterable[int], flush: bool) -> None:
        self.per_stage = precision.dynamic and not flush
        shared = LossScaleState(precision.loss_scale)
        self._scales = {stage: LossScaleState(precision.loss_scale) if self.per_stage else shared for stage in stages}
        self.overflowed: set[int] = set()
        self._newest = -1  # update, of a scale for all stages

    @classmethod
    def build(cls, precision: Precision, stages: Mapping[int, Stage], schedule: Schedule) -> LossScaler:
        """Return the scaler of the stages of a rank.

        Raises:
            UserError: a stage could not know its scale.
        """
        scaler = cls(precision, stages, schedule.flush)
        if scaler.per_stage:
            hint = "set loss_scale to a number such as 1024, or choose a schedule with a flush"
            if schedule.split_backwards:
                raise UserError(f"'{schedule.name}' has no flush and backwards in two halves, between which a loss "
                                "scale that is found while training may change", hint=hint)
            for number, stage in stages.items():
                if (width := len(schedule.placement[number])) > 1 and not stage.weights.names:
                    raise UserError(f"stage {number} trains nothing, so its {width} replicas have no gradients that "
                                    "would tell them that one of them overflowed", hint=f"{hint}, or give it one rank")
        return scaler

    def __getitem__(self, stage: int) -> LossScaleState:
        return self._scales[stage]

    def check_finite(self, stage: int, sent: Collection[Tensor]) -> None:
        """Note an overflow of the stage if something that it sends of a microbatch is not finite."""
        finite = [tensor.isfinite().all() for tensor in sent]
        if finite and not torch.stack(finite).all():  # a GPU is waited for once
            self.overflowed.add(stage)

    def update(self, stage: int, number: int, applied: bool) -> float:
        """Update the scale after a stage's update, applied or skipped; return the factor by which it changed."""
        scale = self._scales[stage]
        before = scale.value
        if self.per_stage or number > self._newest:
            scale.update(applied)
            self._newest = number
        self.overflowed.discard(stage)
        return scale.value / before
