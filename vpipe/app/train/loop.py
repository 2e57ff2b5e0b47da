"""Train on one rank: the loop over steps, and what accompanies it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from math import inf, isfinite
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import NoReturn

import torch
from torch import Tensor

from vpipe import Pipeline, Plan, accelerator, files
from vpipe.app.config.config import config_row
from vpipe.app.data.epoch import prefetched
from vpipe.app.errors import LastingError, StartError
from vpipe.app.progress import message_if_slow
from vpipe.app.run_log import METRICS, EvaluatedLoss, PastMetrics, evaluations_since_best
from vpipe.app.signals import Stopped, graceful_stop
from vpipe.app.train.checkpointing import Cadence, Checkpointing, restore
from vpipe.app.train.event_writers import event_writers
from vpipe.app.train.job import OBSERVERS, Job, device_of
from vpipe.app.train.metrics import Efficiency, Metrics, ProgressBar, StepSize
from vpipe.app.train.model_section import model_flops
from vpipe.app.train.observers import Observer, Run, SummaryPart
from vpipe.app.train.rank_times import RankTimes
from vpipe.app.train.resume import ResumePoint
from vpipe.app.train.run_folder import FACTS, PLAN, SUMMARY, running
from vpipe.app.train.summary import RunFigures, delay_warning, evaluation_text, size_lines, summary, update_line
from vpipe.app.train.torch_profiler import TorchProfiler
from vpipe.app.train.trace_writer import TraceWriter
from vpipe.app.visualize.table import csv_text
from vpipe.checkpoint import Checkpoints
from vpipe.distributed import exchange, join_world, watch
from vpipe.errors import RunError, UserError, counted
from vpipe.runtime import Step
from vpipe.schedules import CsvFile

OWN_OBSERVERS: tuple[type[Observer], ...] = (TorchProfiler, TraceWriter, RankTimes)
"""What accompanies a run whose config asks for it; packages add others."""

MOST_SKIPPED = 20
"""Skipped steps in a row after which ``on_nan: skip`` stops: the weights are lost."""

MOST_OVERFLOWS = 100
"""Overflows in a row after which the loss scale is not the cause: 24 halvings make it the smallest."""

log = logging.getLogger("vpipe")

Batch = Mapping[str, Tensor]


def train(job: Job, folder: Path, start: ResumePoint | None = None) -> Stopped | None:
    """Train as the config says; rank 0 shows progress and writes ``metrics.jsonl`` and the summary.

    All ranks call this. The run ends with an evaluation, after the steps or the minutes of the config. When any rank
    gets a signal, all ranks stop after the same step and save.

    Args:
        start: whose checkpoint to resume from; ``folder`` is prepared for that
            (:func:`~vpipe.app.train.resume.prepare_run`).

    Returns:
        The signal that stopped the run before its end; None at its end.

    Raises:
        LastingError: a loss is not finite, or lines of ``metrics.jsonl`` are lost.
        RunError: the last checkpoint could not be saved.
    """
    torch.set_num_threads(job.config.training.threads)
    with ExitStack() as exits:
        exits.callback(watch.forget_stop)  # a request to stop concerns this run alone, even one before its first step
        devices = join_world(**job.config.parallel.joining)
        first, held = devices.rank == 0, max(exchange().all_gather(accelerator.taken_bytes(devices.own)))
        log.info("rank %d computes on %s", devices.rank, devices.own)
        if first:
            shared = job.config.parallel.transfers.transport == "shared_memory"
            print(f"{size_lines(job)}\n{devices.line(shared)}", flush=True)
            exits.enter_context(running(folder))
        start = start or ResumePoint(None, None)
        if start.manifest is not None:
            job = replace(job, steps_done=start.manifest.step, samples_done=start.manifest.samples)
        if job.config.parallel.to_plan:
            from vpipe.app.train.planning import plan_job  # slow to import

            with watch.activity.during("planning"):
                job = plan_job(job, folder)
        elif first and job.plan is None and (folder / PLAN).exists():
            plan = Plan.load(folder / PLAN)
            job = replace(job, plan=plan if plan.partition == job.cut.partition else None)
        if first and (line := update_line(job)) is not None:
            print(line, flush=True)
        pipe = build_pipeline(job)
        if start.checkpoint is not None and start.manifest is not None:
            with message_if_slow(f"reading {start.checkpoint.name}", first):
                try:
                    line = restore(pipe, job, start.checkpoint, start.manifest)
                except UserError as error:  # of a copy on this rank's host, or damaged since its files were hashed
                    raise StartError.all_of(error.problems) from None
            if first and line is not None:
                print(f"warning: {line}", file=sys.stderr, flush=True)
        elif first and job.config.model.lora is not None:
            print("warning: the weights beside the adapters are random, and stay so; begin with those of a checkpoint: "
                  "vpipe checkpoint import, then vpipe train --resume", file=sys.stderr, flush=True)
        return _TrainingRun(job, pipe, folder, held).train()


class _TrainingRun:
    """The training of a run on this rank, from its first step to its end."""

    def __init__(self, job: Job, pipe: Pipeline, folder: Path, held_bytes: int) -> None:
        self._job, self._pipe, self._folder = job, pipe, folder
        self._held_bytes = held_bytes  # of the fullest process, before any layer was built
        self._ended_by: Mapping[str, float] = {}  # for the summary
        self._policy = job.lr_policy()
        self._skips, self._skipped_in_a_row = job.config.training.on_nan == "skip", 0
        sliced = job.schedule.assignment.slices > 1  # whose losses count by their labels, too
        counted = job.model.labels if sliced else job.update.counted_labels(job.model.labels)
        self._fields = (*(name for stage in pipe.stages for name in stage.fields),
                        *(() if counted is None else (counted,)))
        self._cadence = Cadence(job.config.saving.every_steps, job.config.training.evaluate_every, job.updates)
        log.info("stages %s, layers %s, batch fields %s", [stage.index for stage in pipe.stages],
                 [list(stage.layers) for stage in pipe.stages], list(self._fields))

    def train(self) -> Stopped | None:
        """See :func:`train`."""
        job, pipe, config, show = self._job, self._pipe, self._job.config, self._pipe.rank == 0
        past, self._evaluated = PastMetrics(), 0  # steps done at the latest evaluation
        if job.steps_done:
            if show:
                past = PastMetrics.read(self._folder, job.steps_done)
            past.time_s, evaluations = exchange().from_rank([past.time_s, past.evaluations])
            past.evaluations = [EvaluatedLoss(*each) for each in evaluations]
            self._evaluated = evaluations[-1][0] + 1 if evaluations else 0
        flops = model_flops(config.model, len(job.model))
        efficiency = Efficiency.of_pipe(pipe, flops, config.metrics.peak_tflops, show)
        size = StepSize(*job.step_size, efficiency, job.learns_next_tokens,
                        job.epochs.steps(job.samples_done, job.schedule.assignment.step_microbatches))
        events = event_writers(self._folder, job.steps_done, config_row(config), tensorboard=config.metrics.tensorboard,
                               wandb=config.metrics.wandb) if show else []
        path = self._folder / METRICS if show else None
        with Metrics(path, size, past, job.steps_done, events, pipe) as self._metrics:
            with ExitStack() as self._exits:
                self._open()
                stopped = self._run_steps()
                self._saving.finish()
                parts = [part for observer in self._observers if (part := observer.summary()) is not None]
                result = None if stopped is None else Stopped(stopped, self._saving.is_saved)
                if result is not None:
                    how = f"saved; go on with: vpipe train --resume {quote(str(self._folder))}" if result.saved else \
                        "not saved"
                    self._progress.note(f"stopped by {result.by} after {job.step_name} {self._metrics.steps}: {how}")
            pipe.check_replicas()
            figures = RunFigures.gathered(self._metrics, pipe, job.homes)
            if show:
                self._summarize(figures, parts)
            if stopped is None:
                for observer in self._observers:
                    observer.finish()
        if show:
            self._saving.check_end()
            self._metrics.check_end()
        return result

    def _open(self) -> None:
        """Open the progress bar, the checkpoints and the observers."""
        job, pipe, config, enter = self._job, self._pipe, self._job.config, self._exits.enter_context
        self._progress = enter(ProgressBar(job.updates, config.training.print_frequency, pipe.rank == 0, job.step_name,
                                           job.steps_done, config.training.max_minutes))
        note = self._progress.note
        run = Run(job, pipe, self._folder, self._metrics, note)
        self._observers: list[Observer] = [enter(observer) for kind in (*OWN_OBSERVERS, *OBSERVERS.added())
                                           if (observer := kind.of_run(run)) is not None]
        self._saving = enter(Checkpointing(run))
        enter(graceful_stop())
        watch.note = self._progress.show
        file = CsvFile.read(config.parallel.schedule) if CsvFile.is_path(config.parallel.schedule) else None
        if pipe.rank == 0 and file is not None and file.note is not None:
            note(file.note)
        unseen = None if not config.training.sample_prompts or "samples" in OBSERVERS.names else (
            "training.sample_prompts are not continued: vpipe/extras/generation is missing here")
        for warning in (job.advice.few_microbatches, delay_warning(job), unseen) if pipe.rank == 0 else ():
            if warning is not None:
                note(f"warning: {warning}")
        if pipe.rank == 0:
            try:  # what readers of the other files cannot know from them
                files.replace_text(self._folder / FACTS, json.dumps({
                    "updates": job.updates, "max_minutes": config.training.max_minutes, "ranks": job.homes,
                    "partition": job.cut.partition, "planned_s": _planned_work(job)}))
            except OSError as error:
                log.warning("cannot write '%s': %s", self._folder / FACTS, error.strerror)

    def _summarize(self, figures: RunFigures | None, parts: Sequence[SummaryPart]) -> None:
        """Print the summary, and write it to the log, ``metrics.jsonl`` and the CSV file."""
        text = "\n".join([summary(self._job, self._metrics, figures, self._saving.summary(), self._held_bytes),
                          *(line for part in parts for line in ("", *part.lines))])
        log.info("summary\n%s", text)
        print(text, flush=True)
        if figures is None:
            return
        self._metrics.summary({**figures.as_json(), **self._ended_by,
                               **{key: value for part in parts for key, value in part.figures.items()}})
        try:
            (self._folder / SUMMARY).write_text(csv_text([config_row(self._job.config) | figures.as_row()]),
                                                  encoding="utf-8")
        except OSError as error:  # the log has the figures, too
            self._progress.note(f"warning: cannot write '{self._folder / SUMMARY}': {error.strerror}")

    def _run_steps(self) -> str | None:
        """Train to the end or until a signal; return the signal's name."""
        job, pipe, metrics = self._job, self._pipe, self._metrics
        minutes = job.config.training.max_minutes
        deadline = inf if minutes is None else perf_counter() + 60 * minutes - metrics.time_s
        signal: str | None = None

        def stop() -> bool:  # called on the rank of the last stage
            nonlocal signal
            signal = watch.stop_asked
            return signal is not None or perf_counter() > deadline

        if job.steps_done:
            self._begin_resumed()
        left = None if job.updates is None else job.updates - job.steps_done
        if left == 0:
            self._progress.note(f"nothing is left to do: {counted(job.steps_done, job.step_name)} are done; raise "
                                "training.max_steps or epochs to continue")
        batches = self._exits.enter_context(self._read(job.training_batches(self._fields), "batch"))
        self._before_step()
        for step in pipe.train(batches, self._cadence, updates=left, stop=stop) if left != 0 else ():
            if step.index < metrics.steps:
                continue  # drained and recorded in a pause
            self._record(step)
            if step.stop or any(observer.ends_run for observer in self._observers):
                break
            self._cadence.save = self._saving.agreed_steps() or self._cadence.save
            if self._cadence(step.index) == step.index + 1:
                self._pause(step.index)
                if self._is_patience_over():
                    break
            self._before_step()
        self._record(*pipe.drain())
        for observer in self._observers:
            observer.end()
        complete = metrics.steps == job.updates
        if not complete:
            last = self._pipe.placement[-1][0] * job.config.parallel.tensor  # in the first lane, which decides
            signal = exchange().from_rank(signal, last)
            if signal is None and minutes is not None and perf_counter() > deadline:
                of = f" of {job.updates}" if job.updates is not None else ""
                self._progress.note(f"training.max_minutes, {minutes:g}, is over: {job.step_name} {metrics.steps}{of} "
                                    "was the last")
                self._ended_by = {"ended_by_minutes": minutes}
        if signal is None or complete:
            if self._evaluated != metrics.steps:
                self._evaluate()
            signal = None
        if job.config.saving.at_end or self._saves(metrics.steps - 1):
            self._saving.save()
        return signal

    def _begin_resumed(self) -> None:
        """Report on a resumed run, and make the evaluation that a signal prevented."""
        done = self._job.steps_done
        self._progress.note(f"resuming after {self._job.step_name} {done}")
        if missing := self._metrics.past.missing:
            self._progress.note(f"warning: {METRICS} lacks lines of steps that are done: " + ", ".join(
                str(first) if first == last else f"{first} to {last}" for first, last in missing))
        if Cadence.is_due(self._cadence.evaluate, done - 1, done) and self._evaluated != done:
            self._evaluate()

    def _record(self, *steps: Step) -> None:
        # The config's rate, which is the first stage's: this rank may have none, or with replicas another.
        training = self._job.config.training
        steps = tuple(replace(step, learning_rate=training.learning_rate * self._policy(step.index)) for step in steps)
        self._metrics.update(*steps)
        for step in steps:
            self._progress.update(step, self._metrics)
            self._check_step(step)
        for warning in self._metrics.warnings():
            self._progress.note(f"warning: {warning}")
        for observer in self._observers:
            observer.step(self._metrics.steps)
        self._saving.report()

    def _before_step(self) -> None:
        for observer in self._observers:
            observer.before_step(self._metrics.steps)

    def _pause(self, before: int) -> None:
        """Drain the pipeline between two steps; evaluate, then save, so that the checkpoint follows the evaluation.

        Args:
            before: steps that were done at the last pause; draining may complete more.
        """
        self._record(*self._pipe.drain())
        steps = self._metrics.steps
        if steps != self._job.updates:
            if Cadence.is_due(self._cadence.evaluate, before, steps):
                self._evaluate()
            if self._saves(before):
                self._saving.save()

    def _saves(self, before: int) -> bool:
        """Return whether a checkpoint is due after the last step, if ``before`` steps were done at the last pause."""
        steps, saving = self._metrics.steps, self._job.config.saving
        return Cadence.is_due(self._cadence.save, before, steps) or (
            saving.keep_best and bool(self._cadence.save or saving.every_minutes) and self._evaluated == steps
            and evaluations_since_best(self._metrics.evaluations) == 0)

    def _is_patience_over(self) -> bool:
        patience, evaluations = self._job.config.training.patience, self._metrics.evaluations
        if patience is None or not evaluations or (since := evaluations_since_best(evaluations)) < patience:
            return False
        best = evaluations[-1 - since]
        self._progress.note(f"training.patience, {patience}, is over: no evaluation loss was below {best.loss:.3f}, of "
                            f"{self._job.step_name} {best.step + 1}, in {counted(since, 'evaluation')}")
        return True

    def _evaluate(self) -> None:
        losses = list[float]()
        for averaged in (False, True)[:1 + (self._job.config.training.average is not None)]:
            with self._read(self._job.evaluation_batches(self._fields), "evaluation batch") as batches:
                losses.append(self._pipe.evaluate(batches, averaged=averaged))
        steps = self._evaluated = self._metrics.steps
        self._metrics.evaluation(steps - 1, *losses)
        self._progress.note(evaluation_text(self._job, steps, *losses))
        if not isfinite(losses[0]) and not self._skips:  # where steps are skipped a loss may be infinite
            self._stop(f"the evaluation loss is {losses[0]} after {self._job.step_name} {steps}")

    def _read(self, batches: Iterable[Batch], kind: str) -> AbstractContextManager[Iterator[Batch]]:
        return read_batches(batches, kind, self._pipe, self._job.config.dataset.num_workers if self._fields else 0)

    def _check_step(self, step: Step) -> None:
        """Check a step.

        Raises:
            LastingError: the run must end.
        """
        if isfinite(step.loss) and isfinite(step.gradient_norm or 0.0) and not step.skipped:
            self._skipped_in_a_row = 0
            return
        what = f"loss is {step.loss}" if not isfinite(step.loss) else "the gradient is not finite"
        overflow = self._job.config.training.computed.scaled and step.skipped and isfinite(step.loss)
        if overflow:
            what = "a gradient is beyond fp16's range at this loss scale"
        if self._skips or overflow:
            self._progress.note(f"{self._job.step_name} {step.index + 1} was skipped: {what}")
            self._skipped_in_a_row += 1
            most = MOST_OVERFLOWS if overflow else MOST_SKIPPED
            if self._skipped_in_a_row < most:
                return
            what = f"{most} {self._job.step_name}s in a row were skipped; {what}"
        scale, remedy, setting = self._job.config.training.computed.loss_scale, "", ""
        if overflow and scale is not None:
            flush = not self._job.config.parallel.asynchronous
            remedy = f"lower training.loss_scale, which is {scale:g}" + ", or let it be found" * flush
            setting = f"training.loss_scale={'dynamic' if flush else f'{scale / 64:g}'}"
        elif overflow:
            remedy, setting = "bf16 has fp32's range", "training.precision=bf16"
        self._stop(f"{what} at step {step.index}", remedy, setting, None if overflow else step.not_finite)

    def _stop(self, what: str, remedy: str = "", setting: str = "", microbatch: int | None = None) -> NoReturn:
        self._saving.finish()  # the save of an earlier step
        newest = Checkpoints(self._saving.root).newest() if self._saving.root is not None else None
        hint = remedy or "lower training.learning_rate" + ("" if self._skips else ", or set training.on_nan: skip")
        stage = None if microbatch is None else self._job.cut.count - 1
        setting = setting or f"training.learning_rate={self._job.config.training.learning_rate / 2:g}"
        hint += "; there is no checkpoint before it" if newest is None else (
            f", and go on from step {Checkpoints.step_of(newest)}, such as: vpipe train --resume {quote(str(newest))} "
            f"--set {setting}")
        raise LastingError(what, hint=hint, stage=stage, microbatch=microbatch)


def _planned_work(job: Job) -> list[float] | None:
    """Return the seconds per step that each rank was planned to work; None for a run that follows no plan."""
    plan = job.plan
    if plan is None or plan.predictions is None or plan.partition != job.cut.partition or (
            job.config.parallel.tensor > 1):
        return None
    work = [0.0] * job.schedule.ranks
    for stage, ranks in zip(plan.predicted.stages, job.schedule.placement, strict=True):
        for one in ranks:
            work[one] += stage.microbatch_s * job.schedule.assignment.step_microbatches / len(ranks) + stage.step_s
    return work


def build_pipeline(job: Job) -> Pipeline:
    """Create the pipeline of a job on this rank's device; the ranks of the run have been joined."""
    description = job.description(device_of(job.config))
    model, mesh = job.split_layers(torch.device(description.execution.device or "cpu"))
    description = replace(description, execution=replace(description.execution, mesh=mesh))
    world = join_world(None, description.transfers.timeout_s, description.execution.device, mesh)
    return Pipeline.prepared(model, description, job.schedule, world)


@contextmanager
def read_batches(batches: Iterable[Batch], kind: str, pipe: Pipeline, prefetch: int) -> Iterator[Iterator[Batch]]:
    """Iterate over batches; an error while reading one becomes a :class:`RunError` that names the rank and the batch.

    Args:
        kind: "batch" or "evaluation batch".
        prefetch: batches that a thread prepares ahead, from the second on; 0 reads each when it is needed.
    """
    with closing(_prefetched(batches, prefetch)) if prefetch else nullcontext(iter(batches)) as source:
        yield _with_located_errors(source, kind, pipe)


def _prefetched(batches: Iterable[Batch], prefetch: int) -> Generator[Batch]:
    """Yield the first batch, made in this thread as a check, and the others, which a thread prepares.

    Raises:
        UserError: making a batch draws from torch's default generator, which dropout shares: the numbers would depend
            on timing.
    """
    source, before = iter(batches), torch.get_rng_state()
    first = next(source, None)
    if not torch.equal(torch.get_rng_state(), before):
        raise UserError("the data set draws random numbers from torch's default generator, or seeds it, which a thread "
                        "beside the training must not",
                        hint="give it a torch.Generator of its own, or set dataset.num_workers to 0")
    if first is not None:
        with prefetched(source, prefetch) as others:
            yield first
            yield from others


def _with_located_errors(source: Iterator[Batch], kind: str, pipe: Pipeline) -> Iterator[Batch]:
    stages = [stage.index for stage in pipe.stages]
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
                failed, hint = f"the data set raised {type(error).__name__}: {error}", "fix what raised it"
            raise RunError(failed, hint=hint, rank=pipe.rank, stage=stages[0] if len(stages) == 1 else None,
                           action=f"reading {kind} {number}") from error
        yield batch
