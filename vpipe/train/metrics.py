"""``metrics.jsonl``: one JSON object per update."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType

from vpipe.runtime.engine import Step


class Metrics:
    """Writes one line per update, at once, and keeps what the summary needs.

    The keys: ``step`` (from 0), ``loss``, ``learning_rate``, ``time_s`` (since training began, evaluation left
    out), ``tokens_per_s`` (of this update), and ``gradient_norm`` where it is clipped over all stages; lines of an
    evaluation hold ``step``, ``evaluation_loss`` and ``time_s``.
    """

    def __init__(self, path: Path | None, tokens_per_update: int) -> None:
        self._file = None if path is None else path.open("w", buffering=1)
        self._tokens = tokens_per_update
        self._started = self._last = perf_counter()
        self.update_s: list[float] = []
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, float]] = []

    @property
    def time_s(self) -> float:
        """Seconds of training up to the last update."""
        return self._last - self._started

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
            line: dict[str, float | None] = {
                "step": step.index, "loss": step.loss, "learning_rate": step.learning_rate,
                "time_s": round(self.time_s, 4), "tokens_per_s": round(self._tokens / seconds, 1)}
            if step.gradient_norm is not None:
                line["gradient_norm"] = step.gradient_norm
            self._write(line)

    def evaluation(self, step: int, loss: float) -> None:
        """Record an evaluation after update ``step``; its time does not count as training."""
        now = perf_counter()
        self._started += now - self._last
        self._last = now
        self.evaluations.append((step, loss))
        self._write({"step": step, "evaluation_loss": loss, "time_s": round(self.time_s, 4)})

    def median_update_s(self) -> float:
        return median(self.update_s)

    def _write(self, line: dict[str, float | None]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()


def mean(values: Iterable[float]) -> float:
    """The mean of at least one value."""
    numbers = list(values)
    return sum(numbers) / len(numbers)
