"""One run: train on so many sequences, and say the held-out loss at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from task import SEQUENCES, batches, gpt, partition, text_id, validation

from vpipe import Asynchronous, Execution, Order, Pipeline, Update
from vpipe.app.train.optimizers import LearningRatePolicy, OptimizerSettings, hidden_matrices

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from machine import commit

WEIGHT_DECAY, WARMUP = 0.1, 0.08
COMMIT = commit("vpipe")
"""That last changed vpipe itself: the rows of two commits with the same one may be compared."""
POINTS = 50
"""Of the curve of the training loss."""
FLUSH, TWO_BW, PIPEDREAM, VERTICAL_SYNC = "flush", "2bw", "pipedream", "pipedream_vertical_sync"
EVERY_MICROBATCH = "pipedream, k = 1"
"""``pipedream`` whose batch is one microbatch, so that every stage makes an update after each."""


@dataclass(frozen=True)
class Run:
    """What decides the losses, and nothing else.

    Attributes:
        semantics: ``flush`` (of every synchronous schedule: their losses are the same to the bit), the name of a
            schedule without a flush, or :data:`EVERY_MICROBATCH`.
        stages: on which the delays depend; 0 where the losses do not depend on it (``flush``, ``2bw``).
        batch: sequences of an update.
        optimizer, correction: ``training.optimizer`` and ``training.delay_correction``.
        learning_rate: the highest.
        sequences: on which it trains.
        seed: of weights and data.
    """

    semantics: str
    stages: int
    batch: int
    optimizer: str
    correction: str
    learning_rate: float
    sequences: int = SEQUENCES
    seed: int = 0

    @property
    def updates(self) -> int:
        """Whole ones."""
        return self.sequences // self.batch

    def __str__(self) -> str:
        at = f" p={self.stages}" if self.stages else ""
        return (f"{self.semantics}{at} batch {self.batch} {self.optimizer}"
                f"{' + extrapolate' if self.correction == 'extrapolate' else ''} rate {self.learning_rate:g} "
                f"N x {self.sequences / SEQUENCES:g} seed {self.seed}")


def train(run: Run) -> dict[str, Any]:
    """Do a run; return its row of the results: held-out loss, curve of the training loss, commit, text, time."""
    torch.set_num_threads(1)
    began, cpu = time.perf_counter(), time.process_time()
    pipe = pipeline(run)
    losses = [step.loss for step in pipe.train(_data(run))]
    assert len(losses) == run.updates, f"{len(losses)} updates of {run}"
    loss = pipe.evaluate(validation())
    edges = [point * run.updates // POINTS for point in range(POINTS + 1)]
    curve = [round(fmean(losses[low:high]), 4) for low, high in pairwise(edges)]
    return {"run": asdict(run), "loss": loss, "curve": curve, "commit": COMMIT, "text": text_id(),
            "torch": torch.__version__, "cpu_s": round(time.process_time() - cpu, 1),
            "wall_s": round(time.perf_counter() - began, 1)}


def _data(run: Run) -> Iterator[dict[str, torch.Tensor]]:
    return batches(run.batch, run.updates * run.batch, run.seed)


def pipeline(run: Run) -> Pipeline:
    """The pipeline of a run, all stages in this process.

    A microbatch is one sequence. Where the losses do not depend on how many stages there are, and so not on where a
    batch is divided but for rounding, there are as few stages and microbatches as the schedule can have: twice as fast.
    """
    stages = run.stages or (1 if run.semantics == FLUSH else 2)
    microbatches = {FLUSH: 1, EVERY_MICROBATCH: 1, TWO_BW: 2}.get(run.semantics, run.batch)
    warmup = max(1, round(WARMUP * run.updates))
    schedule = {FLUSH: "1f1b", EVERY_MICROBATCH: PIPEDREAM}.get(run.semantics, run.semantics)
    order = Order(schedule) if run.semantics == FLUSH else Asynchronous(
        schedule, update_every=microbatches, delay_correction=0.0 if run.correction == "none" else 1.0)
    update = Update(optimizer(run.optimizer, run.learning_rate), LearningRatePolicy("polynomial", run.updates, warmup))
    return Pipeline(gpt(), update, stages=partition(stages), schedule=order, microbatches=microbatches,
                    execution=Execution("cpu"), seed=run.seed)


def optimizer(name: str, learning_rate: float) -> OptimizerSettings:
    """Return what makes the optimizers of a stage."""
    return OptimizerSettings(name, learning_rate, WEIGHT_DECAY, matrices=hidden_matrices(gpt()))
