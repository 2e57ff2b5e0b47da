"""The training loop of one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import perf_counter

import torch

from vpipe.errors import RunError, UserError, counted
from vpipe.launch.world import join_world
from vpipe.pipeline import Pipeline
from vpipe.runtime.engine import Step
from vpipe.runtime.feed import Batch
from vpipe.train.device import device_of
from vpipe.train.job import Job
from vpipe.train.metrics import Metrics
from vpipe.train.progress import Progress
from vpipe.train.replan import Replanning
from vpipe.train.report import summary
from vpipe.train.trace import Trace

log = logging.getLogger("vpipe")


def train(job: Job, folder: Path) -> None:
    """Train as the config says; rank 0 shows progress and writes ``metrics.jsonl`` and the summary.

    All ranks call this. The run ends after the updates or the minutes of the config, with an evaluation.
    """
    config = job.config
    torch.set_num_threads(config.training.threads)
    join_world(config.parallel.backend, config.parallel.timeout_s)
    if config.parallel.to_plan:
        from vpipe.train.planning import planned  # which only such a run needs

        job = planned(job, folder)
        config = job.config
    pipe = build(job)
    show = pipe.rank == 0
    fields = tuple(name for stage in pipe.engine.local_stages for name in stage.spec.fields)
    log.info("stages %s, layers %s, batch fields %s", [s.spec.index for s in pipe.engine.local_stages],
             [list(s.spec.layers) for s in pipe.engine.local_stages], list(fields))
    deadline = perf_counter() + 60 * (config.training.max_minutes or float("inf"))
    every, policy = config.training.evaluate_every, job.policy()
    with Metrics(folder / "metrics.jsonl" if show else None, job.tokens_per_update) as metrics, \
            Progress(job.updates, config.training.print_frequency, show, job.step_name) as progress, \
            Trace(folder if config.trace else None, pipe, job.samples_per_update) as trace:
        balance = Replanning(job, pipe, folder, progress.note)

        def record(*steps: Step) -> None:
            # The config's, which is the first stage's: this rank may have none, or with replicas another.
            steps = tuple(replace(step, learning_rate=config.training.learning_rate * policy(step.index))
                          for step in steps)
            metrics.update(*steps)
            for step in steps:
                progress.update(step, metrics)
                balance.step()
            trace.step()

        def evaluate() -> None:
            balance.interrupted()
            record(*pipe.engine.drain())  # updates in flight come before the evaluation, and count as training
            balance.emptied()
            loss = pipe.evaluate(_reading(job.evaluation_batches(fields), "evaluation batch", pipe))
            after = len(metrics.losses) - 1
            metrics.evaluation(after, loss)
            progress.note(f"evaluation loss after {counted(after + 1, job.step_name)}: {loss:.4f}")
            balance.filled_again()

        batches = _reading(job.training_batches(fields), "batch", pipe)
        for step in pipe.engine.train(batches, job.updates, lambda: perf_counter() > deadline):
            if step.index < len(metrics.losses):
                continue  # an evaluation drained it, and it was recorded then
            record(step)
            if step.stop:
                break
            if every and (step.index + 1) % every == 0 and step.index + 1 != job.updates:
                evaluate()
        balance.interrupted()
        record(*pipe.engine.drain())
        if not metrics.evaluations or metrics.evaluations[-1][0] != len(metrics.losses) - 1:
            evaluate()
        balance.end()
        trace.end()
    pipe.engine.all_ranks.check_replicas()
    usages = pipe.engine.all_ranks.usage()
    if show:
        text = summary(job, metrics, usages)
        log.info("summary\n%s", text)
        print(text, flush=True)


def build(job: Job) -> Pipeline:
    """The pipeline that a config describes, on this rank's device."""
    config = job.config
    return Pipeline(job.model, schedule=config.parallel.standing_in.schedule,
                    microbatches=config.training.num_microbatches, partition=job.partition,
                    recompute=[sorted(layers) for layers in job.recomputed], optimizer=job.optimizer(),
                    seed=config.training.seed, placement=job.placement,
                    update_every=config.parallel.update_every,
                    learning_rate_factor=job.policy(), grad_clip=config.training.grad_clip,
                    device=device_of(config),
                    timeout_s=config.parallel.timeout_s, compress=config.parallel.compress,
                    compress_rounding=config.parallel.compress_rounding,
                    compress_feedback=config.parallel.compress_feedback)


def _reading(batches: Iterable[Batch], what: str, pipe: Pipeline) -> Iterator[Batch]:
    """The batches; one that cannot be read (a file that has gone) ends the run with the place."""
    stages = [stage.spec.index for stage in pipe.engine.local_stages]
    source = iter(batches)
    for number in count():
        try:
            batch = next(source)
        except StopIteration:
            return
        except UserError as error:
            problem = error.problems[0]
            raise RunError(problem.what + (f" ({problem.where})" if problem.where else ""), hint=problem.hint,
                           rank=pipe.rank, stage=stages[0] if len(stages) == 1 else None,
                           action=f"reading {what} {number}") from error
        yield batch
