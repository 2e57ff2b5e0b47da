"""The headline figures of a run: those that it showed at its end, or what follows from its files if it had none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from vpipe.measures import counted_updates
from vpipe.report.figures import Figures
from vpipe.report.header import is_number
from vpipe.report.history import History


@dataclass(frozen=True)
class Totals:
    """What docs/metrics.md defines, as far as it is known.

    Attributes:
        samples_per_s, tokens_per_s: over all counted updates.
        step_s: median of one.
        bubble, mfu, hfu: shares; None of what nobody knows, such as the bubble over nccl.
        memory_bytes: of the fullest rank.
        peak: what ``mfu`` and ``hfu`` are shares of.
        doubt: why they cannot be right; None where they can.
    """

    samples_per_s: float
    tokens_per_s: float | None
    step_s: float
    bubble: float | None
    mfu: float | None
    hfu: float | None
    memory_bytes: float | None
    peak: str | None
    doubt: str | None

    @classmethod
    def of(cls, history: History, figures: Figures) -> Totals:
        """Take what the run's summary says; of a run without one, its updates' lines; else what was recorded.

        Args:
            figures: of the recording.
        """
        said = history.summary or {}
        lines = [line for line in history.lines if is_number(line.get("step_s")) and line["step_s"] > 0]
        update_s = counted_updates([line["step_s"] for line in lines])
        lines = lines[len(lines) - len(update_s):]

        def figure(key: str, otherwise: float | None = None) -> float | None:
            if key in said:
                return float(said[key]) if is_number(said[key]) else None
            of_lines = _mean(lines, update_s, key)
            return otherwise if of_lines is None else of_lines

        samples_per_s, bubble = figure("samples_per_s", figures.samples_per_s), figure("bubble", figures.bubble)
        step_s = figure("step_median_s", median(update_s) if update_s else figures.step_s)
        assert samples_per_s is not None, "the recording has one"
        assert step_s is not None, "the recording has one"
        return cls(samples_per_s, figure("tokens_per_s"), step_s, bubble, figure("mfu"), figure("hfu"),
                   figure("memory_bytes"), *(text if isinstance(text := said.get(key), str) else None
                                             for key in ("peak_is", "doubt")))


def _mean(lines: Sequence[Mapping[str, Any]], update_s: Sequence[float], key: str) -> float | None:
    """The mean over the time of some updates of a figure that each has; None where one has not.

    Such a mean of speeds, or of shares of a peak, is what all of these updates together had.
    """
    if not lines or not all(is_number(line.get(key)) for line in lines):
        return None
    return sum(float(line[key]) * seconds for line, seconds in zip(lines, update_s, strict=True)) / sum(update_s)
