"""Read ``RUN/metrics.jsonl``: losses and speeds, and the headline figures of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import median

from vpipe.app.metric_formulas import counted_updates
from vpipe.app.report.figures import Figures, Points
from vpipe.app.report.line_chart import is_drawable
from vpipe.app.report.recording import is_number
from vpipe.app.train.run_log import METRICS, Line, RunLog, mean_figure, number
from vpipe.errors import counted


@dataclass(frozen=True)
class History:
    """The content of ``metrics.jsonl``.

    Attributes:
        losses: (step, loss) in training; of a run that diverged some are no numbers.
        evaluations: (step, loss).
        speeds: (second of training, tokens per second) of each step.
        lines: of the steps, as they are in the file.
        next_tokens: whether the losses are those of next tokens, which have a perplexity.
        summary: the run's summary; None where the last attempt did not end.
        notes: sentences for the reader of the report.
    """

    losses: Points = ()
    evaluations: Points = ()
    speeds: Points = ()
    lines: Sequence[Line] = ()
    next_tokens: bool = False
    summary: Line | None = None
    notes: tuple[str, ...] = ()


def read_history(folder: Path) -> History:
    """Return the metrics of the run in ``folder``; empty where there is no such file.

    Raises:
        UserError: the file cannot be read.
    """
    losses, evaluations, speeds, updates, notes = [], [], [], list[Line](), list[str]()
    summary, damaged, broken_off = None, list[int](), False
    for at, (text, entry) in enumerate(RunLog(folder).entries(), 1):
        if entry is None or not _is_whole(entry):
            damaged.append(at)
            broken_off = not text.endswith("\n")
            continue
        summary = entry.get("summary")  # the last line, where the run has ended
        if "loss" in entry:
            losses.append((entry["step"], number(entry, "loss")))
            speeds.append((entry["time_s"], entry["tokens_per_s"]))
            updates.append(entry)
        elif "evaluation_loss" in entry:
            evaluations.append((entry["step"], number(entry, "evaluation_loss")))
    if not (folder / METRICS).exists():
        notes.append("There is no metrics.jsonl, so no losses and no tokens per second.")
    if damaged and broken_off:
        notes.append(f"metrics.jsonl breaks off in line {damaged.pop()}: the run was ended, or is still going.")
    if damaged:
        notes.append(f"Of metrics.jsonl {counted(len(damaged), 'line')} {'is' if len(damaged) == 1 else 'are'} damaged "
                     f"and left out, the first is line {damaged[0]}.")
    if wrong := [step for step, loss in (*losses, *evaluations) if not is_drawable(loss)]:
        notes.append(f"Of {counted(len(losses) + len(evaluations), 'loss')} {len(wrong):,} "
                     f"{'is no number' if len(wrong) == 1 else 'are no numbers'} (infinite or NaN), the first in "
                     f"step {min(wrong):,.0f}. The charts leave them out.")
    return History(losses, evaluations, speeds, updates, any("perplexity" in line for line in updates), summary,
                   tuple(notes))


def _is_whole(entry: Line) -> bool:
    """Return whether a line has what charts need of it; a loss that was not finite is null."""
    needed = ["step"] + ["time_s"] * ("evaluation_loss" in entry) + ["time_s", "tokens_per_s"] * ("loss" in entry)
    return all(is_number(entry.get(key)) for key in needed) and isinstance(entry.get("summary"), dict | None)


@dataclass(frozen=True)
class Totals:
    """The figures that docs/metrics.md defines, as far as they are known.

    Attributes:
        samples_per_s, tokens_per_s: over all counted updates.
        step_s: median of one.
        bubble, mfu, hfu: shares; None where they are unknown, such as the bubble over nccl, or in one process.
        memory_bytes: of the fullest rank.
        peak: the peak that ``mfu`` and ``hfu`` are shares of, as text.
        doubt: the reason why they cannot be right, if there is one.
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
    def from_history(cls, history: History, figures: Figures) -> Totals:
        """Take the figures of the run's summary, else of its updates' lines, else of the recording."""
        summary = history.summary or {}
        lines = [line for line in history.lines if is_number(line.get("step_s")) and line["step_s"] > 0]
        update_s = counted_updates([line["step_s"] for line in lines])
        lines = lines[len(lines) - len(update_s):]

        def figure(key: str, otherwise: float | None = None) -> float | None:
            if key in summary:
                return float(summary[key]) if is_number(summary[key]) else None
            return otherwise if isnan(of_lines := mean_figure(lines, key)) else of_lines

        samples_per_s, bubble = figure("samples_per_s", figures.samples_per_s), figure("bubble", figures.bubble)
        step_s = figure("step_median_s", median(update_s) if update_s else figures.step_s)
        assert samples_per_s is not None, "the recording has one"
        assert step_s is not None, "the recording has one"
        return cls(samples_per_s, figure("tokens_per_s"), step_s, bubble, figure("mfu"), figure("hfu"),
                   figure("memory_bytes"), *(text if isinstance(text := summary.get(key), str) else None
                                             for key in ("peak_is", "doubt")))
