"""Record a run's steps in ``metrics.jsonl``, one JSON object per update, show them, and compute MFU."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from vpipe import Pipeline
from vpipe.app.errors import LastingError, os_errors
from vpipe.app.metric_formulas import RECENT, WARM_UP, perplexity
from vpipe.app.progress import message_if_slow, on_terminal
from vpipe.app.run_log import AVERAGED, EvaluatedLoss, PastMetrics
from vpipe.app.train.event_writers import EventWriter
from vpipe.app.train.peak_flops import PeakFlops, find_peak
from vpipe.app.visualize.table import compact
from vpipe.errors import counted
from vpipe.runtime import StageUsage, Step

log = logging.getLogger("vpipe")

Line = dict[str, float | str | bool | None]

@dataclass(frozen=True)
class StepSize:
    """The samples and tokens of a step, and what its figures are computed from.

    Attributes:
        efficiency: None for a model family that does not give its FLOPs.
        next_tokens: whether the loss is the mean cross-entropy of the next token, which has a perplexity.
        each: the samples and tokens of every step of this attempt, where they differ; the others are then their mean.
    """

    samples: int
    tokens: int
    efficiency: Efficiency | None = None
    next_tokens: bool = False
    each: Iterator[tuple[int, int]] | None = None

    def perplexity(self, loss: float) -> float | None:
        """Return the perplexity at a loss; None for a model without, and where it is huge or no number."""
        return perplexity(loss) if self.next_tokens else None


class Metrics(AbstractContextManager["Metrics"]):
    """Write a line per update at once, and collect the figures of the summary; docs/metrics.md defines the keys.

    A number that is not finite is ``null``.

    Args:
        path: of the file, which is continued; None writes nothing. While it cannot be written, lines wait.
        past: the lines in it.
        first: steps that are done already.
        events: get the same lines.
        pipe: that is trained.

    Attributes:
        size: of a step.
        update_s, samples, tokens, losses: of the updates of this attempt.
        skipped: number of those that were skipped.
        evaluations: of all attempts.
        warm_usage: of this process at the first update that the figures count, if there is one yet.
    """

    def __init__(self, path: Path | None, size: StepSize, past: PastMetrics | None = None, first: int = 0,
                 events: Iterable[EventWriter] = (), pipe: Pipeline | None = None) -> None:
        self._path, self._file = path, None if path is None else LineWriter(path, truncate=past is None)
        self._events = list(events)
        self._warned_file, self._warned = False, set[str]()
        self._event_errors: dict[str, str] = {}  # by program, why no more lines are passed on
        self.size = size
        self.past = past or PastMetrics()
        self._started = self._last = perf_counter()
        self._started -= self.past.time_s
        self._first = first
        self._sizes = size.each or repeat((size.samples, size.tokens))
        self.update_s: list[float] = []
        self.samples: list[int] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []
        self.skipped = 0
        self.evaluations = [*self.past.evaluations]
        self._pipe = pipe
        self.warm_usage: Mapping[int, Mapping[int, StageUsage]] | None = None

    @property
    def steps(self) -> int:
        """Return the steps done, those of earlier attempts included."""
        return self._first + len(self.losses)

    @property
    def time_s(self) -> float:
        """Return the seconds of training up to the last update, those of earlier attempts included."""
        return self._last - self._started

    @property
    def recent_update_s(self) -> float:
        """Return the mean seconds of the last updates; 0 before the first."""
        return fmean(self.update_s[-RECENT:]) if self.update_s else 0.0

    @property
    def recent_tokens_per_s(self) -> float:
        """Return the tokens per second over the last updates."""
        return fmean(self.tokens[-RECENT:]) / self.recent_update_s if self.update_s else 0.0

    def update(self, *steps: Step) -> None:
        """Record steps that have just ended; several of a draining pipeline share the time."""
        begun, now = self._last, perf_counter()
        for number, step in enumerate(steps, 1):
            seconds = (now - begun) / len(steps)
            self._last = now if number == len(steps) else begun + number * seconds
            samples, tokens = next(self._sizes)
            self.update_s.append(seconds)
            self.samples.append(samples)
            self.tokens.append(tokens)
            self.losses.append(step.loss)
            line: Line = {
                "step": step.index, "loss": finite(step.loss), **self._perplexity(step.loss),
                "learning_rate": step.learning_rate,
                "time_s": round(self.time_s, 4), "step_s": round(seconds, 6),
                "samples_per_s": round(samples / seconds, 2),
                "tokens_per_s": round(tokens / seconds, 2)}
            if self.size.efficiency is not None:
                used = self.size.efficiency.utilization(tokens / seconds)
                line |= {"mfu": float(f"{used.model:.4g}"), "hfu": float(f"{used.hardware:.4g}")}
            # What else the step knows, by its name.
            self._write(line | {name: finite(value) for name, value in vars(step).items() if value is not None
                                and value is not False and name not in ("index", "stop", "not_finite", *line)})
            self.skipped += step.skipped
        if self._pipe is not None and self.warm_usage is None and len(self.update_s) >= WARM_UP:
            self.warm_usage = self._pipe.local_usage()

    def exclude_time(self) -> None:
        """Exclude the time since the last update, or the last call, from the time of training."""
        now = perf_counter()
        self._started += now - self._last
        self._last = now

    def evaluation(self, step: int, loss: float | None, averaged: float | None = None) -> None:
        """Record an evaluation after update ``step``, its time does not count as training; no ``loss``: with the
        average of the weights alone.
        """
        self.exclude_time()
        losses: Line = {}
        if loss is not None:
            self.evaluations.append(EvaluatedLoss(step, loss, averaged))
            losses = {"evaluation_loss": finite(loss), **self._perplexity(loss, "evaluation_")}
        if averaged is not None:
            losses[AVERAGED] = finite(averaged)
        self._write({"step": step, **losses, "time_s": round(self.time_s, 4)})

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of a script's own after update ``step``."""
        self._write({"step": step, "values": {name: finite(value) for name, value in values.items()}})

    def checkpoint(self, step: int, name: str, **facts: float | str) -> None:
        """Record a checkpoint after update ``step`` with its times and bytes, or the ``error`` that prevented it."""
        self._write({"step": step, "checkpoint": name, **facts})

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Record the figures of the run, as the last line."""
        self._write({"step": self.steps - 1, "summary": figures})

    def sync(self) -> None:
        """Flush the lines to the disk, before a checkpoint of the same steps; another thread may call this."""
        if self._file is not None:
            self._file.sync()

    def warnings(self) -> list[str]:
        """Return warnings about files and MFU, each once."""
        found = []
        error = self._file.error if self._file is not None else None
        if (error is not None) != self._warned_file:
            self._warned_file = error is not None
            found.append(f"cannot write '{self._path}': {error}; training continues, and the lines wait until there is "
                         "room" if error is not None else f"'{self._path}' is whole again")
        once = {name: f"cannot write {name} events: {error}; training continues without them"
                for name, error in self._event_errors.items()}
        efficiency = self.size.efficiency
        if efficiency is not None and len(self.update_s) >= RECENT and (
                warning := efficiency.warning(efficiency.utilization(self.recent_tokens_per_s))) is not None:
            once["MFU"] = warning
        found += [text for about, text in once.items() if about not in self._warned]
        self._warned |= once.keys()
        return found

    def check_end(self) -> None:
        """Check that no line is lost, once the file is closed.

        Raises:
            LastingError: lines are lost; another attempt would not bring them back.
        """
        if self._file is not None and self._file.error is not None:
            lines = counted(self._file.waiting, "line")
            raise LastingError(f"the last {lines} of '{self._path}' could not be written: {self._file.error}",
                               hint="make room for the next run; weights and checkpoints are as they should be")

    def _perplexity(self, loss: float, prefix: str = "") -> dict[str, float]:
        found = self.size.perplexity(loss)
        return {} if found is None else {f"{prefix}perplexity": float(f"{found:.6g}")}

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line))
        for events in self._events:
            if events.name not in self._event_errors:
                try:
                    events.line(line)
                except Exception as failed:  # of many classes, some of them the package's
                    self._event_errors[events.name] = (
                        getattr(failed, "strerror", None) or str(failed) or type(failed).__name__)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._file is not None:
            self._file.close()
        for events in self._events:
            events.close(kind is not None)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Show steps, loss, perplexity, gradient norm, tokens per second and time left: a bar, or lines.

    There is a line every ``every`` steps; it also goes to the log of each rank. The bar, which must fit 80 columns, has
    the perplexity or the norm.

    Args:
        steps: of the run; None if unknown.
        show: whether this rank prints.
        name: of a step.
        done: steps of earlier attempts of the run.
        minutes: limit of the run; None without one.
    """

    def __init__(self, steps: int | None, every: int, show: bool, name: str, done: int = 0,
                 minutes: float | None = None) -> None:
        self._steps, self._every, self._show, self._name = steps, every, show, name
        self._end_s = math.inf if minutes is None else 60 * minutes
        self._terminal = on_terminal()
        self._bar = tqdm(total=steps, initial=done, disable=not show or not self._terminal, unit=name, file=sys.stderr,
                         dynamic_ncols=True, mininterval=0.2, smoothing=0.05,
                         bar_format="{unit} {n_fmt}/{total_fmt} |{bar}| {desc}")

    def update(self, step: Step, metrics: Metrics) -> None:
        """Show a step that has ended."""
        done, total = step.index + 1, self._steps
        left_s = min(self._end_s - metrics.time_s,
                     math.inf if total is None else metrics.recent_update_s * (total - done))
        left = [] if left_s == math.inf else [f"{tqdm.format_interval(max(0, left_s))} left"]
        norm = "" if step.gradient_norm is None else f"grad norm {step.gradient_norm:.3g}  "
        loss, rate, size = f"loss {step.loss:.3f}  ", metrics.recent_tokens_per_s, metrics.size
        speed = f"{rate:,.1f} samples/s" if size.tokens == size.samples else f"{rate:,.0f} tokens/s"
        per_token = metrics.size.perplexity(step.loss)
        short = norm if per_token is None else f"ppl {compact(per_token)}  "
        self._bar.set_description_str("  ".join([loss + short + speed, *left]), refresh=False)
        text = loss + ("" if per_token is None else f"perplexity {compact(per_token)}  ") + norm + speed
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
            with suppress(OSError):  # stderr is a file on a full disk: training continues
                print(text, file=sys.stderr, flush=True)
        elif self._show and on_terminal:
            self._bar.write(text, file=sys.stderr)

    def __exit__(self, *failure: object) -> None:
        self._bar.close()


def finite(value: float) -> float | None:
    """Return the value for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None


class LineWriter:
    """Append lines to a file at once. If the disk is full, lines wait in memory for the next try.

    Args:
        truncate: whether the file begins empty.

    Attributes:
        error: why lines wait; None while none does.

    Raises:
        UserError: the file cannot be created.
    """

    def __init__(self, path: Path, truncate: bool) -> None:
        self.error: str | None = None
        self._path, self._waiting = path, bytearray()
        with os_errors(f"cannot write '{path}'", "make it writable, or make room"):
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if truncate else 0), 0o666)

    @property
    def waiting(self) -> int:
        """Return the number of lines that are not in the file, or not completely."""
        return self._waiting.count(b"\n")

    def write(self, line: str) -> None:
        """Append a line."""
        self._waiting += f"{line}\n".encode()
        self._try()

    def sync(self) -> None:
        """Flush the file to the disk, or warn that the disk failed; another thread may call this."""
        if (file := self._file) is not None:
            try:
                os.fsync(file)
            except OSError as error:
                log.warning("%s may lose lines if this host crashes: %s", self._path, error.strerror)

    def close(self) -> None:
        """Try once more to write the lines that wait, and close the file."""
        self._try()
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _try(self) -> None:
        if self._file is None:
            return
        try:
            while self._waiting:  # a disk that is nearly full takes a part of it
                del self._waiting[:os.write(self._file, self._waiting)]
            self.error = None
        except OSError as error:
            self.error = error.strerror or str(error)


class Utilization(NamedTuple):
    """Shares of the peak of the devices."""

    model: float  # MFU
    hardware: float  # HFU


@dataclass(frozen=True)
class Efficiency:
    """The FLOPs of a token and the peak of the devices, from which MFU and HFU follow."""

    layer_flops: tuple[float, ...]  # of a token's forward, per layer
    recompute_flops: float  # of a token's forward in the recomputed layers
    peak: PeakFlops

    @classmethod
    def of_pipe(cls, pipe: Pipeline, layer_flops: Sequence[float] | None, peak_tflops: float | None,
                show: bool = False) -> Efficiency | None:
        """Return the efficiency of a pipeline, the same on every rank; None for a model that does not give its FLOPs.

        All ranks call this: together they measure a peak that is not given.

        Args:
            show: whether to print a line if measuring takes long.
        """
        if layer_flops is None:
            return None
        with message_if_slow("measuring what the devices can do", show and peak_tflops is None):
            peak = find_peak(pipe.device, pipe.description.precision.dtype or torch.float32, peak_tflops)
        again = sum(layer_flops[number] for number in chain.from_iterable(pipe.recomputed))
        return cls(tuple(layer_flops), again, peak)

    def utilization(self, tokens_per_s: float) -> Utilization:
        """Return both shares at a speed.

        With f the floating-point operations of a forward of one token through all layers, r those of its layers
        that are recomputed, n the tokens per second, and P the operations per second that all devices reach together:

            MFU = 3 f n / P        HFU = (3 f + r) n / P

        A backward takes twice the operations of a forward.

        Source: Chowdhery et al., PaLM (2022), appendix B; Korthikanti et al., Reducing Activation Recomputation (2022).
        """
        forward, rate = sum(self.layer_flops), tokens_per_s / (1e12 * self.peak.tflops * self.peak.devices)
        return Utilization(3 * forward * rate, (3 * forward + self.recompute_flops) * rate)

    def warning(self, used: Utilization) -> str | None:
        """Return a warning about an MFU or HFU above 1; None without one."""
        name, share = ("MFU", used.model) if used.model > 1 else ("HFU", used.hardware)
        if share <= 1:
            return None
        least = share * self.peak.tflops
        return (f"the {name} of {100 * share:.0f} % cannot be: the peak is wrong ({self.peak}); the devices reached "
                f"{least:,.4g} TFLOP/s each, so set metrics.peak_tflops to more than that")
