"""Scale the losses of fp16 training, so that small gradients do not become 0 on their way.

There is one scale for all stages: from the norms that they exchange with a flush, all stages know whether an update is
skipped. Without a flush no stage waits for the others, so the scale is fixed, and each stage skips its own updates.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; the constants are those of
:class:`torch.amp.GradScaler`, with a limit.
"""

from __future__ import annotations

INITIAL_SCALE = 65536.0
LEAST_SCALE = 1.0
LARGEST_SCALE = 2.0**24
GROWTH_UPDATES = 2000
"""Updates in a row that are applied before the scale doubles."""


class LossScaler:
    """The loss scale of the stages of one rank, and the number of updates in a row that were applied with it.

    Args:
        fixed: the scale, which then does not change; None: it is found while training.
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
            self.value = max(LEAST_SCALE, self.value / 2)
        elif self.good == GROWTH_UPDATES:
            self.value, self.good = min(LARGEST_SCALE, 2 * self.value), 0
