"""Read ``metrics.jsonl`` of a run, and files like it, while they are written or later.

A line is an object that says its step. What is none was cut short when the process ended, or is damaged: every reader
leaves it out, and :meth:`RunLog.entries` says which it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from vpipe.checkpoint import Checkpoints
from vpipe.errors import UserError

METRICS = "metrics.jsonl"  # a line per step, evaluation and checkpoint, and the summary

TAIL_BYTES, SAMPLE_BYTES = 1 << 20, 1 << 12
"""The end of a file that is read, with the lines of thousands of updates; and the bytes in which one is found."""

EVALUATED, AVERAGED = "evaluation_loss", "evaluation_loss_averaged"

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunLog:
    """The lines of a file in the folder of a run; none where there is no such file."""

    folder: Path
    name: str = METRICS

    def entries(self, key: str = "") -> Iterator[tuple[str, Line | None]]:
        """Yield the text of every line that contains ``key``, and its object; None for what is none.

        Raises:
            UserError: the file cannot be read.
        """
        path = self.folder / self.name
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for text in (text for text in file if key in text):
                    yield text, next(_parsed([text]), None)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"cannot read the metrics: {error.strerror}", where=str(path),
                            hint="copy the file whole from the run's folder") from None

    def tail(self) -> list[Line]:
        """Return the last lines, of a file that another process may be writing."""
        with suppress(OSError), (self.folder / self.name).open("rb") as file:
            if file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)):
                file.readline()
            return list(_parsed(file.read().splitlines()))
        return []

    def last_step(self) -> int | None:
        """Return the last step that a run recorded."""
        return next((line["step"] for line in reversed(self.tail()) if "loss" in line), None)

    def losses(self, most: int) -> Iterator[tuple[int, float]]:
        """Yield step and loss of at most so many moments of a run, spread over the lines that it has written.

        A loss is the mean of those that :data:`SAMPLE_BYTES` hold, from that step on.
        """
        last = -1
        with suppress(OSError), (self.folder / self.name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for part in range(most):
                file.seek(part * size // most)
                if file.tell():
                    file.readline(SAMPLE_BYTES)  # the rest of a line
                lines = [line for line in _parsed(file.read(SAMPLE_BYTES).splitlines())
                         if isfinite(number(line, "loss"))]
                if lines and lines[0]["step"] > last:
                    last = lines[0]["step"]
                    yield last, fmean(line["loss"] for line in lines)


def _parsed(lines: Iterable[str | bytes]) -> Iterator[Line]:
    for line in lines:
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict) and type(found.get("step", found.get("last_step"))) is int:
                yield found


def number(values: Line, key: str) -> float:
    """Return a number of a line; NaN where it is none."""
    value = values.get(key)
    return float(value) if isinstance(value, int | float) else nan


def mean_figure(lines: Sequence[Line], key: str) -> float:
    """Return the mean of a speed, or of a share of a peak, over updates, weighted by their times: the value of all of
    these updates together. NaN where one of them has none.
    """
    seconds = sum(number(line, "step_s") for line in lines)
    return sum(number(line, key) * number(line, "step_s") for line in lines) / (seconds or nan)


class EvaluatedLoss(NamedTuple):
    """An evaluation after update ``step``; ``averaged``: the loss with the average of the weights."""

    step: int
    loss: float
    averaged: float | None = None

    @classmethod
    def of(cls, line: Line) -> EvaluatedLoss:
        return cls(line["step"], number(line, EVALUATED), number(line, AVERAGED) if AVERAGED in line else None)


def evaluations_since_best(evaluations: Sequence[EvaluatedLoss]) -> int:
    """Return how many evaluations, of one at least, have followed the first with the lowest loss."""
    losses = [each.loss if isfinite(each.loss) else inf for each in evaluations]
    return len(losses) - 1 - losses.index(min(losses))


def best_checkpoint(evaluations: Iterable[EvaluatedLoss], found: Iterable[Path]) -> Path | None:
    """Return the checkpoint with the lowest evaluation loss, of equal ones the first; None where none has one."""
    losses = {each.step + 1: each.loss for each in evaluations if isfinite(each.loss)}
    return min((path for path in found if Checkpoints.step_of(path) in losses), default=None,
               key=lambda path: losses[Checkpoints.step_of(path)])


@dataclass
class PastMetrics:
    """The lines of earlier attempts about steps that this attempt does not repeat."""

    lines: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step; NaN where the loss was not finite
    evaluations: list[EvaluatedLoss] = field(default_factory=list)
    time_s: float = 0.0  # of training
    minutes: float = 0.0  # ``training.max_minutes`` that ended an attempt at the last of these steps
    missing: list[tuple[int, int]] = field(default_factory=list)  # first and last step of each gap without lines

    @classmethod
    def read(cls, folder: Path, steps: int) -> PastMetrics:
        """Read the lines of the first ``steps`` steps of a run."""
        past, expected = cls(), None  # a run that began from another run's checkpoint has no lines before it
        for text, line in RunLog(folder).entries():
            if line is None or line["step"] >= steps:
                continue
            past.lines.append(text.rstrip("\n"))
            past.time_s = line.get("time_s", past.time_s)
            if "loss" in line:
                past.losses.append(number(line, "loss"))
                past._note_gap(line["step"], expected)
                expected, past.minutes = line["step"] + 1, 0.0
            elif isinstance(line.get("summary"), dict):
                past.minutes = max(0.0, number(line["summary"], "ended_by_minutes"))  # 0 for none
            elif EVALUATED in line:
                past.evaluations.append(EvaluatedLoss.of(line))
        past._note_gap(steps, expected)
        return past

    def _note_gap(self, step: int, expected: int | None) -> None:
        if expected is not None and step > expected:
            self.missing.append((expected, step - 1))
