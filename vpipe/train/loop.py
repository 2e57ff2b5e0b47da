"""The training loop of one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from math import inf, isfinite
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import NoReturn

import torch

from vpipe.checkpoint.directory import Checkpoints, step_of
from vpipe.checkpoint.manifest import Manifest
from vpipe.data.prefetch import Prefetcher
from vpipe.distributed.init import join_world
from vpipe.distributed.signals import Stopped, in_good_order
from vpipe.distributed.watchdog import at_work, forget_stop, note_to, stop_asked
from vpipe.errors import LastingError, RunError, UserError, counted
from vpipe.metric_formulas import WARM_UP, counted_updates
from vpipe.pipeline import Pipeline
from vpipe.progress import message_if_slow
from vpipe.runtime.build import Settings
from vpipe.runtime.collectives import LocalUsage
from vpipe.runtime.executors.registry import NO_GAIN, THREADED
from vpipe.runtime.microbatches import Batch
from vpipe.runtime.step_results import Step
from vpipe.runtime.transport.compression import Compression
from vpipe.schedules.few_microbatches import few_microbatches
from vpipe.train.checkpointing import Cadence, Checkpointing, broadcast_value, restore
from vpipe.train.csv_rows import config_row, csv_text
from vpipe.train.job import Job, device_of, join
from vpipe.train.metrics import Efficiency, Metrics, Past, Worth
from vpipe.train.progress import Progress
from vpipe.train.rank_times import RankTimes
from vpipe.train.replanning import Replanning
from vpipe.train.run_folder import METRICS, SUMMARY, running
from vpipe.train.summary import RunFigures, summary
from vpipe.train.tensorboard import Events
from vpipe.train.torch_profile import TorchProfile
from vpipe.train.trace import Trace

log = logging.getLogger("vpipe")


def train(job: Job, folder: Path, checkpoint: Path | None = None) -> Stopped | None:
    """Train as the config says; rank 0 shows progress and writes ``metrics.jsonl`` and the summary.

    All ranks call this. The run ends after the updates or the minutes of the config, with an evaluation; or when a
    signal asks any rank to leave off: then all do so after the same step, and save what there is.

    Args:
        checkpoint: to go on from; ``folder`` is ready for that (:func:`~vpipe.train.resume.prepare_run`).

    Returns:
        What ended the run before its end, a signal; None where it came to its end.

    Raises:
        LastingError: a loss is not finite, and the config says to stop then; or lines of ``metrics.jsonl`` are lost.
        RunError: the last checkpoint could not be saved.
    """
    torch.set_num_threads(job.config.training.threads)
    try:
        return _train(job, folder, checkpoint)
    finally:
        forget_stop()  # it was about this run; one that was asked for before its beginning is, too


def _train(job: Job, folder: Path, checkpoint: Path | None) -> Stopped | None:
    devices = join(job.config)
    first = devices.rank == 0
    if first:
        print(devices, flush=True)
    log.info("rank %d computes on %s", devices.rank, devices.own)
    with running(folder) if first else nullcontext():
        manifest = None if checkpoint is None else Manifest.load(checkpoint)
        if manifest is not None:
            job = job.resumed(manifest.step, manifest.samples)
        if job.config.parallel.to_plan:
            from vpipe.train.planning import plan_job  # which only such a run needs

            with at_work("planning"):
                job = plan_job(job, folder)
        pipe = build_pipeline(job)
        if checkpoint is not None and manifest is not None:
            with message_if_slow(f"reading {checkpoint.name}", first):
                restore(pipe, job, checkpoint, manifest)
        return _Run(job, pipe, folder).train()


class _Run:
    """A run on this rank, from its first step to its end."""

    def __init__(self, job: Job, pipe: Pipeline, folder: Path) -> None:
        self._job, self._pipe, self._folder = job, pipe, folder
        self._policy = job.lr_policy()
        self._fields = tuple(name for stage in pipe.engine.local_stages for name in stage.spec.fields)
        training = job.config.training
        self._warm_usage: LocalUsage | None = None  # when the updates began that figures are of
        self._cadence = Cadence(job.config.saving.every_steps, training.evaluate_every, job.updates)
        log.info("stages %s, layers %s, batch fields %s", [s.spec.index for s in pipe.engine.local_stages],
                 [list(s.spec.layers) for s in pipe.engine.local_stages], list(self._fields))

    def train(self) -> Stopped | None:
        """See :func:`train`."""
        job, pipe, folder = self._job, self._pipe, self._folder
        show, training = pipe.rank == 0, job.config.training
        past = Past.read(folder / METRICS, job.steps_done) if show and job.steps_done else Past()
        past.time_s, last = broadcast_value([past.time_s, past.evaluations[-1:]], pipe)
        self._evaluated = last[0][0] + 1 if last else 0  # steps when the latest evaluation was made
        done, name = job.steps_done, job.step_name
        with message_if_slow("measuring what the devices can do", show):
            worth = Worth(job.samples_per_update, job.tokens_per_update, Efficiency.of(job))
        events = Events(folder, done) if show and job.config.metrics.tensorboard else None
        with Metrics(folder / METRICS if show else None, worth, past, done, events) as self._metrics:
            with Progress(job.updates, training.print_frequency, show, name, done,
                          training.max_minutes) as self._progress, \
                    Trace(folder if job.config.trace else None, pipe, job.samples_per_update) as self._trace, \
                    ExitStack() as self._at_end, \
                    TorchProfile(job, pipe, folder, self._progress.note) as self._profile, \
                Checkpointing(job, pipe, folder, self._metrics, self._progress.note) as self._saving, in_good_order():
                note_to(self._progress.show)
                if job.config.parallel.executor == THREADED and device_of(job.config).type == "cpu":
                    self._progress.note(NO_GAIN)
                slow = few_microbatches(job.schedule, "training.num_microbatches", job.config.dataset.batch_size)
                if show and slow is not None:
                    self._progress.note(f"warning: {slow}")
                self._divergence = Divergence(job, self._saving, self._progress.note)
                self._balance = Replanning(job, pipe, folder, self._progress.note)
                self._rank_times = RankTimes(job, pipe, folder, self._progress.note)
                self._at_end.callback(self._rank_times.close)
                stopped = self._steps()
                self._saving.finish()
                self._trace.end()
                ended = None if stopped is None else Stopped(stopped, self._saving.is_saved)
                if ended is not None:
                    self._progress.note(self._words(ended))
            pipe.engine.collectives.check_replicas()
            counted_steps = len(counted_updates(self._metrics.update_s))
            before = self._warm_usage if counted_steps < len(self._metrics.update_s) else None
            usages = pipe.engine.collectives.usage(before)
            if show:
                self._conclude(RunFigures.of(self._metrics, usages, job.placement,
                                             None if before is None else counted_steps))
        if show:
            self._saving.check_end()
            self._metrics.check_end()
        return ended

    def _conclude(self, figures: RunFigures | None) -> None:
        """Show what the run came to, and write it down wherever it belongs."""
        text = summary(self._job, self._metrics, figures, self._saving.summary())
        log.info("summary\n%s", text)
        print(text, flush=True)
        if figures is None:
            return
        self._metrics.summary(figures.as_json())
        try:
            (self._folder / SUMMARY).write_text(csv_text([config_row(self._job.config) | figures.as_row()]))
        except OSError as error:  # what it says is in the log, too
            self._progress.note(f"warning: cannot write '{self._folder / SUMMARY}': {error.strerror}")

    def _steps(self) -> str | None:
        """Train to the end, or until a signal; its name."""
        job, engine, metrics = self._job, self._pipe.engine, self._metrics
        minutes = job.config.training.max_minutes
        deadline = inf if minutes is None else perf_counter() + 60 * minutes - metrics.time_s
        why: str | None = None

        def stop() -> bool:  # asked where the last stage is
            nonlocal why
            why = stop_asked()
            return why is not None or perf_counter() > deadline

        if job.steps_done:
            self._progress.note(f"going on after {job.step_name} {job.steps_done}")
            if lacking := metrics.past.lacking:
                self._progress.note(f"warning: {METRICS} lacks lines of steps that are done: " + ", ".join(
                    str(first) if first == last else f"{first} to {last}" for first, last in lacking))
            if self._cadence.evaluates(job.steps_done - 1, job.steps_done) and self._evaluated != job.steps_done:
                self._evaluate()  # a signal ended the attempt before just where it was due
        left = None if job.updates is None else job.updates - job.steps_done
        if left == 0:
            self._progress.note(f"nothing is left to do: {counted(job.steps_done, job.step_name)} are done; a larger "
                                "training.max_steps or epochs goes on")
        batches = self._at_end.enter_context(self._reading(job.training_batches(self._fields), "batch"))
        self._profile.before(job.steps_done)
        for step in engine.train(batches, left, stop, self._cadence) if left != 0 else ():
            if step.index < metrics.steps:
                continue  # a pause drained it, and it was recorded then
            self._record(step)
            if step.stop or self._profile.ends_run:
                break
            if self._is_due(step.index, step.index + 1):
                self._pause(step.index)
            self._profile.before(metrics.steps)
        self._balance.interrupted()
        self._record(*engine.drain())
        self._balance.end()
        self._rank_times.end()
        ended = metrics.steps == job.updates
        if not ended:
            why = broadcast_value(why, self._pipe, self._pipe.placement[-1][0])
        if why is None or ended:
            if self._evaluated != metrics.steps:
                self._evaluate()
            why = None
        if job.config.saving.at_end or self._cadence.saves(metrics.steps - 1, metrics.steps):
            self._saving.save()
        return why

    def _record(self, *steps: Step) -> None:
        # The config's rate, which is the first stage's: this rank may have none, or with replicas another.
        training = self._job.config.training
        steps = tuple(replace(step, learning_rate=training.learning_rate * self._policy(step.index)) for step in steps)
        self._metrics.update(*steps)
        if self._warm_usage is None and len(self._metrics.update_s) >= WARM_UP:
            self._warm_usage = self._pipe.engine.collectives.local_usage()
        if self._profile.after(self._metrics.steps):
            self._metrics.not_training()
        for step in steps:
            self._progress.update(step, self._metrics)
            self._balance.step()
            self._divergence.step(step)
        for warning in self._metrics.warnings():
            self._progress.note(f"warning: {warning}")
        self._rank_times.step(self._metrics.steps)
        self._trace.step()
        self._saving.report()

    def _is_due(self, before: int, steps: int) -> bool:
        return steps != self._job.updates and (self._cadence.saves(before, steps)
                                               or self._cadence.evaluates(before, steps))

    def _pause(self, before: int) -> None:
        """Between two steps, the pipeline empty: evaluate, then save, so that an evaluation is the checkpoint's past.

        Args:
            before: steps that were done when this was last looked at; a pipeline that is drained may make more.
        """
        self._balance.interrupted()
        self._record(*self._pipe.engine.drain())
        self._balance.emptied()
        steps = self._metrics.steps
        if steps != self._job.updates:
            if self._cadence.evaluates(before, steps):
                self._evaluate()
            if self._cadence.saves(before, steps):
                self._saving.save()
        self._balance.filled_again()

    def _evaluate(self) -> None:
        with self._reading(self._job.evaluation_batches(self._fields), "evaluation batch") as batches:
            loss = self._pipe.evaluate(batches)
        steps = self._evaluated = self._metrics.steps
        self._metrics.evaluation(steps - 1, loss)
        self._progress.note(f"evaluation loss after {counted(steps, self._job.step_name)}: {loss:.4f}")
        self._divergence.evaluation(steps, loss)

    def _reading(self, batches: Iterable[Batch], what: str) -> AbstractContextManager[Iterator[Batch]]:
        return reading(batches, what, self._pipe, self._job.config.dataset.num_workers if self._fields else 0)

    def _words(self, stopped: Stopped) -> str:
        steps = self._metrics.steps
        how = f"saved; go on with: vpipe train --resume {quote(str(self._folder))}" if stopped.saved else "not saved"
        return f"stopped by {stopped.by} after {self._job.step_name} {steps}: {how}"


def build_pipeline(job: Job) -> Pipeline:
    """Create the pipeline of a job on this rank's device; the ranks of the run have been joined."""
    config, parallel, training = job.config, job.config.parallel, job.config.training
    world = join_world(None, parallel.timeout_s, device_of(config))
    settings = Settings(training.num_microbatches, job.recomputed, job.lr_policy(), training.grad_clip, training.seed,
                        world.own, parallel.timeout_s,
                        Compression.parse(parallel.compress, parallel.compress_rounding, len(job.partition),
                                       training.seed),
                        training.on_nan == "skip", training.computed, parallel.executor)
    return Pipeline.from_schedule(job.model, job.partition, parallel.standing_in.schedule, job.schedule, settings,
                                  job.optimizer().from_named, world)


@contextmanager
def reading(batches: Iterable[Batch], what: str, pipe: Pipeline, ahead: int) -> Iterator[Iterator[Batch]]:
    """The batches; one that cannot be read (a file that has gone) ends the run with the place.

    Args:
        what: a batch is called, for messages.
        ahead: so many are prepared in a thread before they are asked for, from the second on; 0: each when it is asked
            for. The thread ends with the context.
    """
    with closing(_prepared(batches, ahead)) if ahead else nullcontext(iter(batches)) as source:
        yield _placed(source, what, pipe)


def _prepared(batches: Iterable[Batch], ahead: int) -> Generator[Batch]:
    """The first when it is asked for, so that it shows what making a batch does; the others in a thread.

    Raises:
        UserError: it draws from torch's default generator. That is the process's, so what a thread draws would be
            missing elsewhere, dropout for one, or come from there, as it happens.
    """
    source, before = iter(batches), torch.get_rng_state()
    first = next(source, None)
    if not torch.equal(torch.get_rng_state(), before):
        raise UserError("the data set draws random numbers from torch's default generator, or seeds it, which a thread "
                        "beside the training must not",
                        hint="give it a torch.Generator of its own, or set dataset.num_workers to 0")
    if first is not None:
        with Prefetcher(source, ahead) as others:
            yield first
            yield from others


def _placed(source: Iterator[Batch], what: str, pipe: Pipeline) -> Iterator[Batch]:
    stages = [stage.spec.index for stage in pipe.engine.local_stages]
    for number in count():
        try:
            batch = next(source)
        except StopIteration:
            return
        except RunError:
            raise
        except Exception as error:
            if isinstance(error, UserError):
                problem = error.problems[0]
                failed, hint = problem.what + (f" ({problem.where})" if problem.where else ""), problem.hint
            else:
                failed, hint = f"the data set raised {type(error).__name__}: {error}", "mend what raised it"
            raise RunError(failed, hint=hint, rank=pipe.rank, stage=stages[0] if len(stages) == 1 else None,
                           action=f"reading {what} {number}") from error
        yield batch


MOST_SKIPPED = 20
"""Steps skipped in a row, after which ``on_nan: skip`` stops, too: the weights are lost, not a batch odd."""
MOST_OVERFLOWS = 100
"""Steps in a row that fp16 left out, after which it is not the scale of the loss: that is least after 24 halvings, of
each stage where each has its own."""


class Divergence:
    """Stops the run, or tells of what was skipped. All ranks make one, and show it the same steps.

    Args:
        note: shows a line.
    """

    def __init__(self, job: Job, saving: Checkpointing, note: Callable[[str], None]) -> None:
        self._job, self._saving, self._note = job, saving, note
        self._skips = job.config.training.on_nan == "skip"
        self._scaled = job.config.training.computed.scaled
        self._in_a_row = 0

    def step(self, step: Step) -> None:
        """Look at a step that was made.

        Raises:
            LastingError: it ends the run.
        """
        if isfinite(step.loss) and isfinite(step.gradient_norm or 0.0) and not step.skipped:
            self._in_a_row = 0
            return
        what = f"loss is {step.loss}" if not isfinite(step.loss) else "the gradient is not finite"
        overflow = self._scaled and step.skipped and isfinite(step.loss)
        if overflow:
            what = "a gradient is beyond fp16's range at this loss scale"
        if self._skips or overflow:
            self._note(f"{self._job.step_name} {step.index + 1} was skipped: {what}")
            self._in_a_row += 1
            most = MOST_OVERFLOWS if overflow else MOST_SKIPPED
            if self._in_a_row < most:
                return
            what = f"{most} {self._job.step_name}s in a row were skipped; {what}"
            scale = self._job.config.training.computed.loss_scale
            if overflow and scale is not None:
                self._stop(f"{what} at step {step.index}", f"lower training.loss_scale, which is {scale:g}, or let it "
                           "be found", "training.loss_scale=dynamic")
            if overflow:
                self._stop(f"{what} at step {step.index}", "bf16 has fp32's range", "training.precision=bf16")
        self._stop(f"{what} at step {step.index}")

    def evaluation(self, steps: int, loss: float) -> None:
        """Look at an evaluation after so many steps. Where updates are skipped it may be odd: each of them was finite.

        Raises:
            LastingError: it ends the run.
        """
        if not isfinite(loss) and not self._skips:
            self._stop(f"the evaluation loss is {loss} after {self._job.step_name} {steps}")

    def _stop(self, what: str, remedy: str = "", setting: str = "") -> NoReturn:
        self._saving.finish()  # that of a step before it
        newest = Checkpoints(self._saving.root).newest() if self._saving.root is not None else None
        hint = remedy or "lower training.learning_rate" + ("" if self._skips else ", or set training.on_nan: skip")
        if newest is None:
            raise LastingError(what, hint=f"{hint}; there is no checkpoint before it")
        setting = setting or f"training.learning_rate={self._job.config.training.learning_rate / 2:g}"
        raise LastingError(what, hint=f"{hint}, and go on from step {step_of(newest)}, such as: vpipe train --resume "
                           f"{quote(str(newest))} --set {setting}")
