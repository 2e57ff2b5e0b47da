"""The training loop of one rank."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from time import perf_counter

import torch
from tqdm import tqdm

from vpipe.launch.world import join_world
from vpipe.pipeline import Pipeline
from vpipe.runtime.engine import Step
from vpipe.train.job import Job
from vpipe.train.metrics import Metrics
from vpipe.train.report import summary

log = logging.getLogger("vpipe")


def train(job: Job, folder: Path) -> None:
    """Train as the config says; rank 0 shows progress and writes ``metrics.jsonl`` and the summary.

    All ranks call this. The run ends after the updates or the minutes of the config, with an evaluation.
    """
    config = job.config
    torch.set_num_threads(config.training.threads)
    join_world(config.parallel.backend, config.parallel.timeout_s)
    pipe = build(job)
    show = pipe.rank == 0
    fields = tuple(name for stage in pipe.engine.local_stages for name in stage.spec.fields)
    log.info("stages %s, layers %s, batch fields %s", [s.spec.index for s in pipe.engine.local_stages],
             [list(s.spec.layers) for s in pipe.engine.local_stages], list(fields))
    deadline = perf_counter() + 60 * (config.training.max_minutes or float("inf"))
    every = config.training.evaluate_every
    with Metrics(folder / "metrics.jsonl" if show else None, job.tokens_per_update) as metrics, \
            Bar(job.updates, show) as bar:

        def record(step: Step) -> None:
            metrics.update(step)
            bar.update(step, metrics)

        def evaluate(after: int) -> None:
            loss = pipe.evaluate(job.evaluation_batches(fields))
            metrics.evaluation(after, loss)
            bar.note(f"evaluation loss after update {after}: {loss:.4f}")

        steps = pipe.engine.train(job.training_batches(fields), job.updates, lambda: perf_counter() > deadline)
        for step in steps:
            record(step)
            if step.stop:
                break
            if every and (step.index + 1) % every == 0 and step.index + 1 != job.updates:
                evaluate(step.index)
        for step in pipe.engine.drain():
            record(step)
        evaluate(len(metrics.losses) - 1)
    usages = pipe.engine.usage()
    if show:
        text = summary(job, metrics, usages)
        log.info("summary\n%s", text)
        print(text, flush=True)


def build(job: Job) -> Pipeline:
    """The pipeline that a config describes, on this rank's device."""
    config = job.config
    device = "cpu"
    if config.parallel.backend == "nccl":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    partition = config.parallel.partition
    assert not isinstance(partition, str), "a job's partition is a list"
    asynchronous = config.parallel.asynchronous
    return Pipeline(job.model, schedule=config.parallel.schedule, microbatches=config.training.num_microbatches,
                    partition=partition, recompute=config.parallel.recompute_ratios, optimizer=job.optimizer(),
                    seed=config.training.seed, placement=job.placement,
                    update_every=config.parallel.update_every if asynchronous else None,
                    learning_rate_factor=job.policy(), grad_clip=config.training.grad_clip, device=device,
                    timeout_s=config.parallel.timeout_s)


class Bar:
    """The progress bar: updates, loss, tokens per second, time left."""

    def __init__(self, updates: int | None, show: bool) -> None:
        terminal = sys.stderr.isatty()
        self._bar = tqdm(total=updates, disable=not show, unit="update", file=sys.stderr, dynamic_ncols=terminal,
                         mininterval=0.2 if terminal else 10.0, smoothing=0.05,
                         bar_format="{n_fmt}/{total_fmt} |{bar}| {desc} {elapsed}<{remaining}")

    def update(self, step: Step, metrics: Metrics) -> None:
        self._bar.set_description_str(f"loss {step.loss:.3f}  {metrics.recent_tokens_per_s:,.0f} tokens/s",
                                      refresh=False)
        self._bar.update()

    def note(self, text: str) -> None:
        """A line above the bar."""
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.close()
