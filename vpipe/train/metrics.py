"""What a run writes of its steps: ``metrics.jsonl``, one JSON object per update, and the same as events."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from vpipe.errors import LastingError, UserError, counted
from vpipe.metric_formulas import Utilization
from vpipe.profiling.peak_flops import Peak, peak_of
from vpipe.profiling.world import World
from vpipe.runtime.step_results import Step
from vpipe.train.job import Job, device_of
from vpipe.train.model_settings import model_flops
from vpipe.train.tensorboard import Events

log = logging.getLogger("vpipe")

Number = float | None
Line = dict[str, float | str | bool | None]

RECENT = 20
"""Updates whose speed is shown while training."""


@dataclass
class Past:
    """What the attempts of a run before this one have written of the steps that need not be made again.

    Attributes:
        lines: as they stay in the file.
        losses: of every step; NaN where it was not finite.
        evaluations: the step each came after, and its loss.
        time_s: seconds of training.
        lacking: the steps of which there should be a line, and is none: first and last of those in a row.
    """

    lines: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    time_s: float = 0.0
    lacking: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, steps: int) -> Past:
        """The lines of the first ``steps`` steps; of a file that was cut off within a line, the whole lines."""
        past, expected = cls(), None  # a run that began with another one's checkpoint has no line of steps before it
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
                past._follows(step, expected)
                expected = step + 1
            elif "evaluation_loss" in line:
                past.evaluations.append((step, _number(line["evaluation_loss"])))
        past._follows(steps, expected)
        return past

    def _follows(self, step: int, expected: int | None) -> None:
        if expected is not None and step > expected:
            self.lacking.append((expected, step - 1))


@dataclass(frozen=True)
class Worth:
    """What a step is worth.

    Attributes:
        samples, tokens: that it trains on.
        efficiency: what its MFU follows from; None where nobody knows it.
    """

    samples: int
    tokens: int
    efficiency: Efficiency | None = None


class Metrics:
    """Writes one line per update, at once, and keeps what the summary needs.

    The keys: ``step`` (from 0), ``loss``, ``learning_rate``, ``time_s`` (since training began, evaluation left
    out); of this update ``step_s``, ``samples_per_s``, ``tokens_per_s``, and ``mfu`` and ``hfu`` where they are known;
    ``gradient_norm`` where it is clipped over all stages, and ``skipped`` where it was left out; a number that is not
    finite is ``null``. Lines of an evaluation hold ``step``, ``evaluation_loss`` and ``time_s``; those of a checkpoint
    what :meth:`checkpoint` says; the last one what :meth:`summary` does.

    Args:
        path: of the file, which is continued; None writes nothing. While it cannot be written, lines wait.
        past: what is in it already.
        first: steps that are done already.
        events: written the same; None where nobody wants them.

    Attributes:
        worth: of a step.
        update_s, losses: of the updates since this object was made.
        skipped: how many of those were left out.
        evaluations: the same, by the step each came after.
    """

    def __init__(self, path: Path | None, worth: Worth, past: Past | None = None, first: int = 0,
                 events: Events | None = None) -> None:
        self._path, self._file = path, None if path is None else Lines(path, anew=past is None)
        self._events = events
        self._told = False  # that lines wait
        self._doubted = self._events_told = False
        self.worth = worth
        self.past = past or Past()
        self._started = self._last = perf_counter()
        self._started -= self.past.time_s
        self._first = first
        self.update_s: list[float] = []
        self.losses: list[float] = []
        self.skipped = 0
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
    def recent_update_s(self) -> float:
        """Seconds of an update, the mean of the last ones; 0 before the first."""
        recent = self.update_s[-RECENT:]
        return sum(recent) / len(recent) if recent else 0.0

    @property
    def recent_tokens_per_s(self) -> float:
        """Over the last updates."""
        return self.worth.tokens / self.recent_update_s if self.update_s else 0.0

    def update(self, *steps: Step) -> None:
        """Record training steps that have just ended; those of a draining pipeline end together and share the time."""
        begun, now = self._last, perf_counter()
        for number, step in enumerate(steps, 1):
            seconds = (now - begun) / len(steps)
            self._last = now if number == len(steps) else begun + number * seconds
            self.update_s.append(seconds)
            self.losses.append(step.loss)
            line: Line = {
                "step": step.index, "loss": finite(step.loss), "learning_rate": step.learning_rate,
                "time_s": round(self.time_s, 4), "step_s": round(seconds, 6),
                "samples_per_s": round(self.worth.samples / seconds, 2),
                "tokens_per_s": round(self.worth.tokens / seconds, 1)}
            if self.worth.efficiency is not None:
                used = self.worth.efficiency.at(self.worth.tokens / seconds)
                line |= {"mfu": float(f"{used.model:.4g}"), "hfu": float(f"{used.hardware:.4g}")}
            if step.gradient_norm is not None:
                line["gradient_norm"] = finite(step.gradient_norm)
            if step.skipped:
                line["skipped"] = True
                self.skipped += 1
            self._write(line)

    def not_training(self) -> None:
        """The time since the last update, or since this was said, does not count as training."""
        now = perf_counter()
        self._started += now - self._last
        self._last = now

    def evaluation(self, step: int, loss: float) -> None:
        """Record an evaluation after update ``step``; its time does not count as training."""
        self.not_training()
        self.evaluations.append((step, loss))
        self._write({"step": step, "evaluation_loss": finite(loss), "time_s": round(self.time_s, 4)})

    def checkpoint(self, step: int, name: str, **facts: float | str) -> None:
        """Record a checkpoint that was made after update ``step``: its ``name``, then ``pause_s`` of training,
        ``save_s`` until it was complete, ``bytes`` and ``drain_s``; or ``error``, why there is none."""
        self._write({"step": step, "checkpoint": name, **facts})

    def median_update_s(self) -> float:
        """Seconds of an update, of at least one in this attempt."""
        return median(self.update_s)

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Record what the run comes to at its end, behind everything else."""
        self._write({"step": self.steps - 1, "summary": figures})

    def sync(self) -> None:
        """Let the lines so far reach the disk, as a checkpoint of the same steps will; another thread may call it."""
        if self._file is not None:
            try:
                self._file.sync()
            except OSError as error:
                log.warning("%s may lose lines if this host crashes: %s", self._path, error.strerror)

    def warnings(self) -> list[str]:
        """What the user should know, each thing once."""
        found = []
        error = self._file.error if self._file is not None else None
        if (error is not None) != self._told:
            self._told = error is not None
            found.append(f"cannot write '{self._path}': {error}; training goes on, and the lines wait until there is "
                         "room" if error is not None else f"'{self._path}' is whole again")
        if self._events is not None and self._events.error is not None and not self._events_told:
            self._events_told = True
            found.append(f"cannot write the events of TensorBoard: {self._events.error}; training goes on without them")
        efficiency = self.worth.efficiency
        if efficiency is not None and not self._doubted and len(self.update_s) >= RECENT:
            doubt = efficiency.doubt(efficiency.at(self.recent_tokens_per_s))
            if doubt is not None:
                self._doubted = True
                found.append(doubt)
        return found

    def check_end(self) -> None:
        """Once the file is closed, a run of which lines are lost is none that went well.

        Raises:
            LastingError: they are; to train again would not bring them back.
        """
        if self._file is not None and self._file.error is not None:
            lines = counted(self._file.waiting, "line")
            raise LastingError(f"the last {lines} of '{self._path}' could not be written: {self._file.error}",
                               hint="make room for the next run; weights and checkpoints are as they should be")

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line))
        if self._events is not None:
            self._events.line(line)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


def finite(value: float) -> Number:
    """Return the value as JSON has it: None where it is not finite."""
    return value if math.isfinite(value) else None


def _number(value: Number) -> float:
    return math.nan if value is None else value


def mean(values: Iterable[float]) -> float:
    """The mean of at least one value."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


class Lines:
    """Appends each line at once. Where it cannot, the disk being full, the line waits in memory and is tried again with
    the next one: no run should end for it.

    Args:
        path: of the file.
        anew: whether what is in it goes.

    Attributes:
        error: why the lines that wait could not be written, in words; None while none wait.

    Raises:
        UserError: the file cannot be made.
    """

    def __init__(self, path: Path, anew: bool) -> None:
        self.error: str | None = None
        self._waiting = bytearray()
        try:
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0), 0o666)
        except OSError as error:
            raise UserError(f"cannot write '{path}': {error.strerror}", hint="make it writable, or make room") from None

    @property
    def waiting(self) -> int:
        """How many lines are not in the file, or not all of them."""
        return self._waiting.count(b"\n")

    def write(self, line: str) -> None:
        """Append a line."""
        self._waiting += f"{line}\n".encode()
        self._try()

    def sync(self) -> None:
        """Let what was written reach the disk; another thread may call it.

        Raises:
            OSError: it could not.
        """
        if (file := self._file) is not None:
            os.fsync(file)

    def close(self) -> None:
        """Try once more to write what waits."""
        self._try()
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _try(self) -> None:
        if self._file is None:
            return
        try:
            while self._waiting:  # a disk that is nearly full takes a part
                del self._waiting[:os.write(self._file, self._waiting)]
            self.error = None
        except OSError as error:
            self.error = error.strerror or str(error)


@dataclass(frozen=True)
class Efficiency:
    """What MFU and HFU of a run follow from, once its tokens per second are known.

    Attributes:
        layer_flops: operations of a token's forward, per layer.
        again_flops: those of the layers that are recomputed.
        peak: of the devices.
    """

    layer_flops: tuple[float, ...]
    again_flops: float
    peak: Peak

    @classmethod
    def of(cls, job: Job) -> Efficiency | None:
        """Every rank of a run calls this: where nobody knows the peak they measure it together.

        Returns:
            The same on every rank; None of a family that does not say what its layers compute.
        """
        layers = layer_flops(job)
        if layers is None:
            return None
        config, device = job.config, device_of(job.config)
        dtype = config.training.computed.dtype or torch.float32
        peak = peak_of(World(device), device, dtype, config.metrics.peak_tflops)
        return cls(tuple(layers), 0.0, peak).recomputing(job.recomputed)

    def recomputing(self, layers: Iterable[Iterable[int]]) -> Efficiency:
        """The same where these layers are recomputed, per stage by their numbers in the model."""
        return replace(self, again_flops=sum(self.layer_flops[number] for number in chain.from_iterable(layers)))

    def at(self, tokens_per_s: float) -> Utilization:
        """At a speed of the run."""
        return Utilization.of(sum(self.layer_flops), self.again_flops, tokens_per_s, self.peak.flops_per_s)

    def doubt(self, used: Utilization) -> str | None:
        """What is to be said wherever shares are shown that cannot be; None of those that can."""
        name, share = ("MFU", used.model) if used.model > 1 else ("HFU", used.hardware)
        if share <= 1:
            return None
        least = share * self.peak.tflops
        return (f"the {name} of {100 * share:.0f} % cannot be: the peak is wrong ({self.peak}); the devices reached "
                f"{least:,.4g} TFLOP/s each, so set metrics.peak_tflops to more than that")


def layer_flops(job: Job) -> list[int] | None:
    """Operations of a token's forward, per layer; None of a family that does not say them."""
    return model_flops(job.config.model, len(job.model))
