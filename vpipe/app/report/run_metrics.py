"""Read ``RUN/metrics.jsonl``: losses and speeds, and the headline figures of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from vpipe.app.metric_formulas import counted_updates
from vpipe.app.report.figures import Figures, Points
from vpipe.app.report.line_chart import is_drawable
from vpipe.app.report.recording import damaged_line, is_number
from vpipe.errors import UserError, counted

_AGAIN = "a line is an object with step, loss, time_s and tokens_per_s; copy the file whole from the run's folder"


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
    lines: Sequence[Mapping[str, Any]] = ()
    next_tokens: bool = False
    summary: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def read_history(folder: Path) -> History:
    """Return the metrics of the run in ``folder``; empty where there is no such file.

    Raises:
        UserError: a line is damaged.
    """
    path = folder / "metrics.jsonl"
    losses, evaluations, speeds, updates, notes = [], [], [], list[Mapping[str, Any]](), list[str]()
    summary = None
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return History(notes=("There is no metrics.jsonl, so no losses and no tokens per second.",))
    except OSError as error:
        raise UserError(f"cannot read the metrics: {error.strerror}", where=str(path), hint=_AGAIN) from None
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines) and not line.endswith("\n"):
                notes.append(f"metrics.jsonl breaks off in line {number}: the run was ended, or is still going.")
                break
            raise damaged_line("metrics", path, number, line, _AGAIN) from None
        entry = entry if isinstance(entry, dict) else {}
        summary = entry.get("summary")  # the last line, where the run has ended
        if ("checkpoint" in entry or "summary" in entry or "values" in entry) and isinstance(summary, dict | None):
            continue
        entry |= {key: nan for key in ("loss", "evaluation_loss") if entry.get(key, 0) is None}  # it was not finite
        placed = _numbers(entry, "step", "time_s") and is_drawable(entry["step"]) and is_drawable(entry["time_s"])
        if placed and _numbers(entry, "evaluation_loss"):
            evaluations.append((entry["step"], entry["evaluation_loss"]))
        elif placed and _numbers(entry, "loss", "tokens_per_s"):
            losses.append((entry["step"], entry["loss"]))
            speeds.append((entry["time_s"], entry["tokens_per_s"]))
            updates.append(entry)
        else:
            raise damaged_line("metrics", path, number, line, _AGAIN)
    if wrong := [step for step, loss in (*losses, *evaluations) if not is_drawable(loss)]:
        notes.append(f"Of {counted(len(losses) + len(evaluations), 'loss')} {len(wrong):,} "
                     f"{'is no number' if len(wrong) == 1 else 'are no numbers'} (infinite or NaN), the first in "
                     f"step {min(wrong):,.0f}. The charts leave them out.")
    return History(losses, evaluations, speeds, updates, any("perplexity" in line for line in updates), summary,
                   tuple(notes))


def _numbers(entry: dict[str, Any], *keys: str) -> bool:
    return all(type(value) is float or (type(value) is int and is_drawable(value)) for value in map(entry.get, keys))


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
            of_lines = _mean(lines, update_s, key)
            return otherwise if of_lines is None else of_lines

        samples_per_s, bubble = figure("samples_per_s", figures.samples_per_s), figure("bubble", figures.bubble)
        step_s = figure("step_median_s", median(update_s) if update_s else figures.step_s)
        assert samples_per_s is not None, "the recording has one"
        assert step_s is not None, "the recording has one"
        return cls(samples_per_s, figure("tokens_per_s"), step_s, bubble, figure("mfu"), figure("hfu"),
                   figure("memory_bytes"), *(text if isinstance(text := summary.get(key), str) else None
                                             for key in ("peak_is", "doubt")))


def _mean(lines: Sequence[Mapping[str, Any]], update_s: Sequence[float], key: str) -> float | None:
    """Return the time-weighted mean over updates of a figure that each has; None where one has not.

    Such a mean of speeds, or of shares of a peak, is the value of all of these updates together.
    """
    if not lines or not all(is_number(line.get(key)) for line in lines):
        return None
    return sum(float(line[key]) * seconds for line, seconds in zip(lines, update_s, strict=True)) / sum(update_s)
