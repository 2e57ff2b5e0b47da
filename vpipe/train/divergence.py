"""What a run does about a loss or a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from shlex import quote
from typing import NoReturn

from vpipe.checkpoint.directory import Checkpoints, step_of
from vpipe.errors import LastingError
from vpipe.runtime.step_results import Step
from vpipe.train.checkpointing import Saving
from vpipe.train.job import Job

MOST_SKIPPED = 20
"""Steps skipped in a row, after which ``on_nan: skip`` stops, too: the weights are lost, not a batch odd."""
MOST_OVERFLOWS = 100
"""Steps in a row that fp16 left out, after which it is not the scale of the loss: that is least after 24 halvings, of
each stage where each has its own."""


class Divergence:
    """Stops the run, or tells of what was skipped. All ranks make one, and show it the same steps.

    Args:
        note: shows a line.
    """

    def __init__(self, job: Job, saving: Saving, note: Callable[[str], None]) -> None:
        self._job, self._saving, self._note = job, saving, note
        self._skips = job.config.training.on_nan == "skip"
        self._scaled = job.config.training.computed.scaled
        self._in_a_row = 0

    def step(self, step: Step) -> None:
        """Look at a step that was made.

        Raises:
            LastingError: it ends the run.
        """
        if isfinite(step.loss) and isfinite(step.gradient_norm or 0.0) and not step.skipped:
            self._in_a_row = 0
            return
        what = f"loss is {step.loss}" if not isfinite(step.loss) else "the gradient is not finite"
        overflow = self._scaled and step.skipped and isfinite(step.loss)
        if overflow:
            what = "a gradient is beyond fp16's range at this loss scale"
        if self._skips or overflow:
            self._note(f"{self._job.step_name} {step.index + 1} was skipped: {what}")
            self._in_a_row += 1
            most = MOST_OVERFLOWS if overflow else MOST_SKIPPED
            if self._in_a_row < most:
                return
            what = f"{most} {self._job.step_name}s in a row were skipped; {what}"
            scale = self._job.config.training.computed.loss_scale
            if overflow and scale is not None:
                self._stop(f"{what} at step {step.index}", f"lower training.loss_scale, which is {scale:g}, or let it "
                           "be found", "training.loss_scale=dynamic")
            if overflow:
                self._stop(f"{what} at step {step.index}", "bf16 has fp32's range", "training.precision=bf16")
        self._stop(f"{what} at step {step.index}")

    def evaluation(self, steps: int, loss: float) -> None:
        """Look at an evaluation after so many steps. Where updates are skipped it may be odd: each of them was finite.

        Raises:
            LastingError: it ends the run.
        """
        if not isfinite(loss) and not self._skips:
            self._stop(f"the evaluation loss is {loss} after {self._job.step_name} {steps}")

    def _stop(self, what: str, remedy: str = "", setting: str = "") -> NoReturn:
        self._saving.finish()  # that of a step before it
        newest = Checkpoints(self._saving.root).newest() if self._saving.root is not None else None
        hint = remedy or "lower training.learning_rate" + ("" if self._skips else ", or set training.on_nan: skip")
        if newest is None:
            raise LastingError(what, hint=f"{hint}; there is no checkpoint before it")
        setting = setting or f"training.learning_rate={self._job.config.training.learning_rate / 2:g}"
        raise LastingError(what, hint=f"{hint}, and go on from step {step_of(newest)}, such as: vpipe train --resume "
                           f"{quote(str(newest))} --set {setting}")
