"""``metrics.jsonl``: one JSON object per update."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType

from vpipe.runtime.engine import Step

Number = float | None
Line = dict[str, float | str | bool | None]


@dataclass
class Past:
    """What the attempts of a run before this one have written of the steps that need not be made again.

    Attributes:
        lines: as they stay in the file.
        losses: of every step; NaN where it was not finite.
        evaluations: the step each came after, and its loss.
        time_s: seconds of training.
    """

    lines: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    time_s: float = 0.0

    @classmethod
    def read(cls, path: Path, steps: int) -> Past:
        """The lines of the first ``steps`` steps; of a file that was cut off within a line, the whole lines."""
        past = cls()
        if not path.exists():
            return past
        for text in path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
                step = line["step"]
            except (ValueError, TypeError, KeyError):
                continue  # a process was killed as it wrote it
            if step >= steps:
                continue
            past.lines.append(text)
            past.time_s = line.get("time_s", past.time_s)
            if "loss" in line:
                past.losses.append(_number(line["loss"]))
            elif "evaluation_loss" in line:
                past.evaluations.append((step, _number(line["evaluation_loss"])))
        return past


class Metrics:
    """Writes one line per update, at once, and keeps what the summary needs.

    The keys: ``step`` (from 0), ``loss``, ``learning_rate``, ``time_s`` (since training began, evaluation left
    out), ``tokens_per_s`` (of this update), ``gradient_norm`` where it is clipped over all stages, and ``skipped``
    where it was left out; a number that is not finite is ``null``. Lines of an evaluation hold ``step``,
    ``evaluation_loss`` and ``time_s``; those of a checkpoint what :meth:`checkpoint` says.

    Args:
        path: of the file, which is continued; None writes nothing.
        past: what is in it already.

    Attributes:
        update_s, losses: of the updates since this object was made.
        evaluations: the same, by the step each came after.
    """

    def __init__(self, path: Path | None, tokens_per_update: int, past: Past | None = None, first: int = 0) -> None:
        self._file = None if path is None else path.open("w" if past is None else "a", buffering=1)
        self._tokens = tokens_per_update
        self.past = past or Past()
        self._started = self._last = perf_counter()
        self._started -= self.past.time_s
        self._first = first
        self.update_s: list[float] = []
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, float]] = []

    @property
    def steps(self) -> int:
        """How many are done, with those of earlier attempts."""
        return self._first + len(self.losses)

    @property
    def time_s(self) -> float:
        """Seconds of training up to the last update, with those of earlier attempts."""
        return self._last - self._started

    @property
    def attempt_s(self) -> float:
        """Seconds of training up to the last update, since this object was made."""
        return self.time_s - self.past.time_s

    @property
    def recent_tokens_per_s(self) -> float:
        """Over the last updates."""
        recent = self.update_s[-20:]
        return self._tokens * len(recent) / sum(recent) if recent else 0.0

    def update(self, *steps: Step) -> None:
        """Record training steps that have just ended; those of a draining pipeline end together and share the time."""
        begun, now = self._last, perf_counter()
        for number, step in enumerate(steps, 1):
            seconds = (now - begun) / len(steps)
            self._last = now if number == len(steps) else begun + number * seconds
            self.update_s.append(seconds)
            self.losses.append(step.loss)
            line: Line = {
                "step": step.index, "loss": _finite(step.loss), "learning_rate": step.learning_rate,
                "time_s": round(self.time_s, 4), "tokens_per_s": round(self._tokens / seconds, 1)}
            if step.gradient_norm is not None:
                line["gradient_norm"] = _finite(step.gradient_norm)
            if step.skipped:
                line["skipped"] = True
            self._write(line)

    def evaluation(self, step: int, loss: float) -> None:
        """Record an evaluation after update ``step``; its time does not count as training."""
        now = perf_counter()
        self._started += now - self._last
        self._last = now
        self.evaluations.append((step, loss))
        self._write({"step": step, "evaluation_loss": _finite(loss), "time_s": round(self.time_s, 4)})

    def checkpoint(self, step: int, name: str, **facts: float | str) -> None:
        """Record a checkpoint that was made after update ``step``: its ``name``, then ``pause_s`` of training,
        ``save_s`` until it was complete, ``bytes`` and ``drain_s``; or ``error``, why there is none."""
        self._write({"step": step, "checkpoint": name, **facts})

    def median_update_s(self) -> float:
        return median(self.update_s)

    def _write(self, line: Line) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()


def _finite(value: float) -> Number:
    return value if math.isfinite(value) else None


def _number(value: Number) -> float:
    return math.nan if value is None else value


def mean(values: Iterable[float]) -> float:
    """The mean of at least one value."""
    numbers = list(values)
    return sum(numbers) / len(numbers)
