"""Record the training of a script as ``vpipe train`` records a run, so that the commands on runs read its folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from torch import Tensor

from vpipe import Pipeline, files
from vpipe.app.launch.failure_report import write_report
from vpipe.app.run_log import METRICS
from vpipe.app.signals import STOPS
from vpipe.app.train.event_writers import check_installed, event_writers
from vpipe.app.train.metrics import Efficiency, Metrics, ProgressBar, StepSize
from vpipe.app.train.observers import Observer
from vpipe.app.train.rank_times import RankTimes
from vpipe.app.train.run_folder import FACTS, running
from vpipe.app.train.summary import RunFigures
from vpipe.app.train.trace_writer import TraceWriter
from vpipe.distributed import exchange
from vpipe.errors import RunError, UserError, VpipeError
from vpipe.runtime import Step

Batch = Mapping[str, Tensor]


class RecordedRun:
    """A script's training, in a folder that ``vpipe watch`` and ``vpipe trace`` read, with progress on the screen.

    All ranks make one, enter it, train and evaluate by it, and leave it::

        with RecordedRun(pipe, "output/spirals", updates=200, trace=True) as run:
            for step in run.train(batches):
                ...

    Meanwhile SIGTERM, SIGINT and SIGUSR1 end training on all ranks after the same update, by
    :meth:`vpipe.Pipeline.stop`; a second signal does what it did before. Leaving ends the microbatches in flight, and
    writes the summary.

    Args:
        pipe: not in training.
        folder: of the run, without another run in it; ranks on other hosts write what they record into theirs.
        updates: after which :meth:`train` ends, those of a loaded checkpoint included; None: with the batches.
        tokens_per_sample: for the tokens per second; of 1 the samples per second are shown.
        next_tokens: whether the loss is the mean cross-entropy of the next token, and has a perplexity.
        flops: of the forward of one token, for each layer of the model; without them there is no MFU.
        peak_tflops: of one device; None: of its data sheet, or measured.
        print_every: updates between two lines on stderr, where that is no terminal, which has a bar.
        trace: record all actions.
        tensorboard, wandb: pass every line of ``metrics.jsonl`` on.

    Attributes:
        folder: of the run.
        stopped_by: the signal that ended training, on a rank that got one.

    Raises:
        UserError: the folder has a run or cannot be written, or a package is missing.
    """

    def __init__(self, pipe: Pipeline, folder: str | Path, *, updates: int | None = None, tokens_per_sample: int = 1,
                 next_tokens: bool = False, flops: Sequence[float] | None = None, peak_tflops: float | None = None,
                 print_every: int = 10, trace: bool = False, tensorboard: bool = False,
                 wandb: Literal["offline", "online"] | None = None) -> None:
        check_installed(tensorboard, "tensorboard", "tensorboard is True", "leave it out")
        check_installed(wandb is not None, "wandb", f"wandb is '{wandb}'", "leave it out")
        if flops is not None and len(flops) != len(pipe.model):
            raise UserError(f"flops has {len(flops)} numbers, the model {len(pipe.model)} layers",
                            hint="give one per layer: what its forward computes for one token")
        self.folder, self._pipe = Path(folder), pipe
        self.stopped_by: str | None = None
        self._stopped = False
        self._updates, self._tokens_per_sample, self._print_every = updates, tokens_per_sample, print_every
        self._next_tokens, self._trace, self._tensorboard, self._wandb = next_tokens, trace, tensorboard, wandb
        self._efficiency = Efficiency.of_pipe(pipe, flops, peak_tflops)
        self._homes = [[rank * pipe.lanes + lane for rank in ranks for lane in range(pipe.lanes)]
                       for ranks in pipe.placement]
        self._handlers = ExitStack()  # restores those of before

    def __enter__(self) -> Self:
        pipe, first = self._pipe, self._pipe.rank == 0
        done = pipe.position.updates
        self._make_folder()
        with ExitStack() as stack:
            if first:
                stack.enter_context(running(self.folder))
                files.replace_text(self.folder / FACTS, json.dumps({
                    "updates": self._updates, "max_minutes": None, "ranks": self._homes, "partition": pipe.partition,
                    "planned_s": None}))
            events = event_writers(self.folder, done, {}, tensorboard=self._tensorboard,
                                   wandb=self._wandb) if first else []
            # How many samples a step has is known after the first.
            size = StepSize(0, 0, self._efficiency, self._next_tokens, self._step_sizes(done, pipe.position.samples))
            path = self.folder / METRICS if first else None
            self._metrics = stack.enter_context(Metrics(path, size, None, done, events, pipe))
            self._progress = stack.enter_context(ProgressBar(self._updates, self._print_every, first, "update", done))
            self._tracer = TraceWriter(self.folder, pipe, 0) if self._trace else None
            times = RankTimes(self.folder, pipe, self._progress.note, done=done)
            self._observers: list[Observer] = [times, *filter(None, [self._tracer])]
            for observer in self._observers:
                stack.enter_context(observer)
            if current_thread() is main_thread():
                for number in STOPS:
                    handler = signal.signal(number, self._on_signal) or signal.SIG_DFL
                    self._handlers.callback(signal.signal, number, handler)
                stack.enter_context(self._handlers)
            self._exits = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None:
            with self._exits:
                self._record(*self._pipe.drain())
                for observer in self._observers:
                    observer.end()
                figures = self.figures()
                if figures is not None:
                    self._metrics.summary(figures.as_json())
            self._metrics.check_end()
            return
        self._exits.__exit__(kind, error, trace)
        if self.folder.is_dir():
            write_report(self.folder, self._pipe.rank, error if isinstance(error, VpipeError) else RunError(
                f"{kind.__name__ if kind else ''}: {error}", hint="see the script's traceback", rank=self._pipe.rank))

    def train(self, batches: Iterable[Batch], pauses: int | Collection[int] | None = None, *,
              stop: Callable[[], bool] | None = None) -> Iterator[Step]:
        """Train as :meth:`vpipe.Pipeline.train` does, and record every update. The time between two calls of this does
        not count as training. A run that was stopped trains no more, so that a loop over epochs comes to its end."""
        left = None if self._updates is None else max(0, self._updates - self._pipe.position.updates)
        if self._stopped or left == 0:
            return
        self._metrics.exclude_time()
        for step in self._pipe.train(batches, pauses, updates=left, stop=stop):
            self._record(step)
            if step.stop:
                self._stopped = True
                by = "" if self.stopped_by is None else f" by {self.stopped_by}"
                self._progress.note(f"stopped{by} after update {step.index + 1}")
            yield step

    def evaluate(self, batches: Iterable[Batch], **arguments: Any) -> Any:
        """Return what :meth:`vpipe.Pipeline.evaluate` does, of the same arguments, and record the loss."""
        self._record(*self._pipe.drain())
        found = self._pipe.evaluate(batches, **arguments)
        loss = found[0] if isinstance(found, tuple) else found
        done = self._pipe.position.updates
        weights = " with averaged weights" if arguments.get("averaged") else ""
        self._metrics.evaluation(done - 1, None if weights else loss, loss if weights else None)
        self._progress.note(f"evaluation loss{weights} after update {done}: {loss:.4f}")
        return found

    def log(self, **values: float) -> None:
        """Record numbers of one's own beside the latest update, by name; also for TensorBoard and Weights & Biases."""
        self._metrics.values(self._metrics.steps - 1, {name: float(value) for name, value in values.items()})

    def figures(self) -> RunFigures | None:
        """Return the figures so far that docs/metrics.md defines, as the summary of a run has them, and per stage; None
        before the first update. Every rank must call it; speeds are by its own clock."""
        return RunFigures.gathered(self._metrics, self._pipe, self._homes)

    def _make_folder(self) -> None:
        """Make the folder on rank 0; all ranks refuse one that has a run."""
        problem = None
        if self._pipe.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if (self.folder / METRICS).exists():
                    problem = f"there is a run in '{self.folder}'", "give this one another folder"
            except OSError as error:
                problem = f"cannot make the run's folder '{self.folder}': {error.strerror}", "give it another"
        if told := exchange(timeout_s=self._pipe.description.transfers.timeout_s).from_rank(problem):
            raise UserError(told[0], hint=told[1])

    def _record(self, *steps: Step) -> None:
        """Record steps, less those that were drained before, and recorded then."""
        steps = tuple(step for step in steps if step.index >= self._metrics.steps)
        if not steps:
            return
        self._metrics.update(*steps)
        for step in steps:
            self._progress.update(step, self._metrics)
        for warning in self._metrics.warnings():
            self._progress.note(f"warning: {warning}")
        for observer in self._observers:
            observer.step(self._metrics.steps)

    def _step_sizes(self, done: int, samples: int) -> Iterator[tuple[int, int]]:
        """Yield the samples and tokens of every step, when it has been made; of several at once an equal part of all.
        The pipeline has trained ``done`` updates of so many samples before."""
        first = done, samples
        while True:
            now = self._pipe.position
            made, count = now.samples - samples, now.updates - done
            mean = round((now.samples - first[1]) / (now.updates - first[0]))
            self._metrics.size = replace(self._metrics.size, samples=mean, tokens=mean * self._tokens_per_sample)
            if self._tracer is not None:
                self._tracer.samples_per_step = mean
            for number in range(count):
                each = made * (number + 1) // count - made * number // count
                yield each, each * self._tokens_per_sample
            done, samples = now.updates, now.samples

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._handlers.close()
        self.stopped_by = signal.Signals(number).name
        self._pipe.stop()
