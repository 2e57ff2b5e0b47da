"""``RUN/metrics.jsonl``: how the loss and the speed of a run went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from vpipe.errors import UserError, counted
from vpipe.report.chart import is_number

_AGAIN = "a line is an object with step, loss, time_s and tokens_per_s; copy the file whole from the run's folder"


@dataclass(frozen=True)
class History:
    """What ``metrics.jsonl`` says.

    Attributes:
        losses: (step, loss) in training; of a run that diverged some are no numbers.
        evaluations: (step, loss).
        seconds: (second of training, tokens per second) of each step.
        lines: of the steps, as they are in the file.
        summary: what the run came to; None of one whose last attempt did not come to its end.
        notes: what a reader has to know.
    """

    losses: Sequence[tuple[float, float]] = ()
    evaluations: Sequence[tuple[float, float]] = ()
    seconds: Sequence[tuple[float, float]] = ()
    lines: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def read_history(folder: Path) -> History:
    """The metrics of the run in ``folder``; none where there is no such file.

    Raises:
        UserError: a line is damaged.
    """
    path = folder / "metrics.jsonl"
    losses, evaluations, seconds, updates, notes = [], [], [], list[Mapping[str, Any]](), list[str]()
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
            raise _damaged(path, number, line) from None
        summary = None  # the last line, where the run has ended
        if isinstance(entry, dict) and ("checkpoint" in entry or "summary" in entry):
            summary = entry.get("summary")
            if not isinstance(summary, dict | None):
                raise _damaged(path, number, line)
            continue
        if isinstance(entry, dict):  # what is not finite is null
            entry |= {key: nan for key in ("loss", "evaluation_loss") if key in entry and entry[key] is None}
        if not (isinstance(entry, dict) and _numbers(entry, "step", "time_s")
                and is_number(entry["step"]) and is_number(entry["time_s"])):
            raise _damaged(path, number, line)
        if _numbers(entry, "evaluation_loss"):
            evaluations.append((entry["step"], entry["evaluation_loss"]))
        elif _numbers(entry, "loss", "tokens_per_s"):
            losses.append((entry["step"], entry["loss"]))
            seconds.append((entry["time_s"], entry["tokens_per_s"]))
            updates.append(entry)
        else:
            raise _damaged(path, number, line)
    if wrong := [step for step, loss in (*losses, *evaluations) if not is_number(loss)]:
        notes.append(f"Of {counted(len(losses) + len(evaluations), 'loss')} {len(wrong):,} "
                     f"{'is no number' if len(wrong) == 1 else 'are no numbers'} (infinite or NaN), the first in "
                     f"step {min(wrong):,.0f}. The charts leave them out.")
    return History(losses, evaluations, seconds, updates, summary, tuple(notes))


def _numbers(entry: dict[str, Any], *keys: str) -> bool:
    return all(type(value) is float or (type(value) is int and is_number(value)) for value in map(entry.get, keys))


def _damaged(path: Path, number: int, line: str) -> UserError:
    shown = line.strip()
    return UserError(f"line {number} of the metrics is damaged: {shown[:60]}{'...' if len(shown) > 60 else ''}",
                     where=f"{path}:{number}", hint=_AGAIN)
