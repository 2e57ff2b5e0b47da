"""Show the progress of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from math import inf

from tqdm import tqdm

from vpipe.runtime.step_results import Step
from vpipe.train.metrics import Metrics

log = logging.getLogger("vpipe")


class ProgressBar:
    """Show steps, loss, gradient norm, tokens per second and time left: a bar, or a line every ``every`` steps.

    The lines also go to the log of each rank.

    Args:
        steps: of the run; None if unknown.
        show: whether this rank prints.
        name: of a step.
        done: steps of earlier attempts of the run.
        minutes: after which the run ends; None without such a limit.
    """

    def __init__(self, steps: int | None, every: int, show: bool, name: str, done: int = 0,
                 minutes: float | None = None) -> None:
        self._steps, self._every, self._show, self._name = steps, every, show, name
        self._end_s = inf if minutes is None else 60 * minutes
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=done, disable=not show or not self._terminal, unit=name, file=sys.stderr,
                         dynamic_ncols=True, mininterval=0.2, smoothing=0.05,
                         bar_format="{unit} {n_fmt}/{total_fmt} |{bar}| {desc}")

    def update(self, step: Step, metrics: Metrics) -> None:
        """Show a step that has ended."""
        done, total = step.index + 1, self._steps
        left_s = min(self._end_s - metrics.time_s, inf if total is None else metrics.recent_update_s * (total - done))
        left = [] if left_s == inf else [f"{tqdm.format_interval(max(0, left_s))} left"]
        norm = "" if step.gradient_norm is None else f"grad norm {step.gradient_norm:.3g}  "
        text = f"loss {step.loss:.3f}  {norm}{metrics.recent_tokens_per_s:,.0f} tokens/s"
        self._bar.set_description_str("  ".join([text, *left]), refresh=False)  # fits 80 columns
        self._bar.update()
        if done % self._every == 0 or done == total:
            of = f"/{total}" if total else ""
            times = ", ".join([tqdm.format_interval(metrics.time_s), *left])
            self.note(f"{self._name} {done}{of}: {text}  {times}", on_terminal=False)

    def note(self, text: str, on_terminal: bool = True) -> None:
        """Write a line to the log and to the screen, above the bar if there is one."""
        log.info(text)
        self.show(text, on_terminal)

    def show(self, text: str, on_terminal: bool = True) -> None:
        """Write a line to the screen only."""
        if self._show and not self._terminal:
            with suppress(OSError):  # stderr is a file on a full disk: training goes on
                print(text, file=sys.stderr, flush=True)
        elif self._show and on_terminal:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.close()
