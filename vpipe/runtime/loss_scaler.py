"""The numbers by which fp16 multiplies losses, so that small gradients do not become 0 on their way.

With a flush there is one for all stages: the norms that they exchange tell all of them alike whether an update is left
out. Without one each stage has its own, since nobody waits for the others: a gradient that arrives is brought from the
scale of the stage that sent it to that of the stage that takes it, and an update is left out where it is not finite.
Then a scale must also fall when what a stage hands on overflows, its own gradients being finite: otherwise the stages
before would leave out all their updates, for ever.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; the constants are those of
:class:`torch.amp.GradScaler`, with a limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.runtime.precision import Precision
from vpipe.runtime.stage import Stage
from vpipe.schedules.action import Op
from vpipe.schedules.schedule import Schedule

INITIAL_SCALE = 65536.0
LEAST_SCALE = 1.0
LARGEST_SCALE = 2.0**24
GROWTH_UPDATES = 2000
"""Updates in a row that are applied before the scale doubles."""


class LossScale:
    """One scale.

    Args:
        fixed: a scale that stays; None: it doubles after many good updates, and an overflow halves it.
    """

    def __init__(self, fixed: float | None) -> None:
        self.dynamic = fixed is None
        self.value = INITIAL_SCALE if fixed is None else fixed
        self.good = 0  # updates in a row that were applied

    def updated(self, applied: bool) -> None:
        """An update was made, or left out because of an overflow."""
        if not self.dynamic:
            return
        self.good = self.good + 1 if applied else 0
        if not applied:
            self.value = max(LEAST_SCALE, self.value / 2)
        elif self.good == GROWTH_UPDATES:
            self.value, self.good = min(LARGEST_SCALE, 2 * self.value), 0


class Scaling:
    """The scales of the stages of one rank.

    Attributes:
        travels: whether scales differ from stage to stage, and go with the gradients.
    """

    def __init__(self, precision: Precision, stages: Iterable[int], flush: bool) -> None:
        self.travels = precision.dynamic and not flush
        shared = LossScale(precision.loss_scale)
        self._scales = {stage: LossScale(precision.loss_scale) if self.travels else shared for stage in stages}
        self._newest = -1  # update, of a scale for all stages
        self._lost: set[int] = set()

    @classmethod
    def of(cls, precision: Precision, stages: Mapping[int, Stage], schedule: Schedule) -> Scaling | None:
        """That of the stages of a rank; None where losses are not scaled.

        Raises:
            UserError: a stage could not know its scale.
        """
        if not precision.scaled:
            return None
        scaling = cls(precision, stages, schedule.flush)
        if scaling.travels:
            hint = "set loss_scale to a number such as 1024, or choose a schedule with a flush"
            if any(action.op is Op.INPUT for program in schedule.programs for action in program):
                raise UserError(f"'{schedule.name}' has no flush and backwards in two halves, between which a loss "
                                "scale that is found while training may change", hint=hint)
            for number, stage in stages.items():
                if (width := len(schedule.placement[number])) > 1 and not stage.weights.names:
                    raise UserError(f"stage {number} trains nothing, so its {width} replicas have no gradients that "
                                    "would tell them that one of them overflowed", hint=f"{hint}, or give it one rank")
        return scaling

    def __getitem__(self, stage: int) -> LossScale:
        return self._scales[stage]

    def sent(self, stage: int, device: torch.device) -> Tensor:
        """The scale of a gradient that a stage hands on, as it travels behind it: ``[1]`` fp32."""
        return torch.tensor([self._scales[stage].value], device=device)

    def factor(self, stage: int, theirs: float) -> float:
        """By what a gradient of a scale is multiplied to have that of a stage."""
        return self._scales[stage].value / theirs

    def watch(self, stage: int, handed_on: Collection[Tensor]) -> None:
        """Look whether what a stage hands on of a microbatch, to other stages, is finite; else its update is lost."""
        if not all(bool(tensor.isfinite().all()) for tensor in handed_on):
            self._lost.add(stage)

    def is_lost(self, stage: int) -> bool:
        """Whether something that the stage handed on, in the update at hand, was not finite."""
        return stage in self._lost

    def lose(self, stage: int) -> None:
        """Another replica of the stage has lost the update."""
        self._lost.add(stage)

    def abandon(self) -> None:
        """Forget what was lost of updates that failed before a step."""
        self._lost.clear()

    def updated(self, stage: int, number: int, applied: bool) -> float:
        """A stage has made an update, or left it out; by what its scale was multiplied."""
        scale = self._scales[stage]
        before = scale.value
        if self.travels or number > self._newest:
            scale.updated(applied)
            self._newest = number
        self._lost.discard(stage)
        return scale.value / before
