"""Run one rank's part of a comparison: build the contenders, let them take turns, write what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from vpipe.app.config.config import load_config
from vpipe.app.errors import PlanningError
from vpipe.app.launch.tasks import job_in
from vpipe.app.train.csv_rows import csv_text
from vpipe.app.train.job import Job, device_of
from vpipe.app.train.loop import build_pipeline
from vpipe.app.train.metrics import Efficiency
from vpipe.app.train.run_folder import CONFIG
from vpipe.distributed import join_world
from vpipe.errors import Problem, UserError, counted
from vpipe.extras.comparison.chart import draw
from vpipe.extras.comparison.planning import Contender, plan_contenders
from vpipe.extras.comparison.results import Comparison, Outcome
from vpipe.extras.comparison.round_robin import TimedTraining, take_turns
from vpipe.extras.comparison.systems import ComparisonRequest
from vpipe.profiling import RankGroup
from vpipe.runtime import StageUsage
from vpipe.schedules import RecordedAction

RECORDED = 20_000
"""Actions per rank whose memory is recorded: a pipeline reaches its peak early."""
EVERY_S = 5.0
"""Seconds between two lines of progress where there is no terminal."""
CSV = "comparison.csv"
_NO_UPDATE = Problem("made no update", "give more samples, epochs or minutes")


def run_comparison(folder: Path, rank: int, arguments: Sequence[str]) -> None:
    """Run this rank's part of ``vpipe compare``.

    Args:
        folder: with the config of the first model.
        arguments: ``--systems``, ``--schedules`` and ``--memory``, each empty where left out; then of each model its
            name and the file of its config in ``folder``.
    """
    request = ComparisonRequest.parse(*(argument or None for argument in arguments[:3]))
    job, models = job_in(folder), arguments[3:]
    jobs = {model: job if file == CONFIG else Job.from_config(load_config(folder / file))
            for model, file in zip(models[::2], models[1::2], strict=True)}

    def plan(world: RankGroup) -> list[Contender]:
        return plan_contenders(jobs, request, world, lambda line: _log(line) if world.rank == 0 else None)

    compare(jobs, folder, plan)


def compare(jobs: Mapping[str, Job], folder: Path, plan: Callable[[RankGroup], list[Contender]]) -> None:
    """Train contenders in turns on all ranks, and compare them.

    Rank 0 shows progress and the table, and writes ``comparison.json``, ``.svg`` and ``.csv``.

    Args:
        jobs: by model. A contender's plan replaces their schedule, partition, recompute and microbatches.
        plan: called on every rank once they have joined; the contenders of rank 0 count.

    Raises:
        PlanningError: no contender can take part.
    """
    config = next(iter(jobs.values())).config
    torch.set_num_threads(config.training.threads)
    join_world(**config.parallel.joining)
    world = RankGroup(device_of(config))
    planned = plan(world)
    world.barrier("planning")  # rank 0 may have planned for longer than a message may take
    contenders = [Contender.from_json(one) for one in world.all_gather([one.as_json() for one in planned])[0]]
    runs, refused = _build(jobs, contenders)
    if not runs:
        raise PlanningError.all_of([Problem(f"no contender can take part: {name}: {why.what}", why.hint)
                                    for name, why in refused.items()])
    efficiency = {model: Efficiency.from_job(job) for model, job in jobs.items()}
    progress = _Progress(list(dict.fromkeys(runs.values())), world.rank == 0)
    with progress.bar:
        take_turns(progress.runs, world.barrier, perf_counter,
                   progress.show)
        refused |= {name: _NO_UPDATE for name, run in runs.items() if not run.losses}  # on no rank
        runs = {name: run for name, run in runs.items() if run.losses}
        if not runs:
            raise PlanningError("no contender made an update", hint=_NO_UPDATE.hint)
        progress.note("evaluating")
        mine = {run: (run.measured(), run.evaluate()) for run in dict.fromkeys(runs.values())}
    measured = world.all_gather([ranks for ranks, _ in mine.values()])
    if world.rank:
        return
    of_ranks = {run: list(chain.from_iterable(ranks))
                for run, ranks in zip(mine, zip(*measured, strict=True), strict=True)}
    outcomes = [run.outcome(contender, _job_of(contender, jobs), of_ranks[run], mine[run][1],
                            efficiency[run.contender.model])
                for contender in contenders if (run := runs.get(contender.name)) is not None]
    limits = {one.contender.memory_bytes for one in outcomes}
    comparison = Comparison("; ".join(dict.fromkeys(map(_title, jobs.values()))),
                            limits.pop() if len(limits) == 1 else None, outcomes,
                            {name: why.what for name, why in refused.items()})
    for name, content in (("comparison.json", json.dumps(comparison.as_json(), indent=1) + "\n"),
                          ("comparison.svg", draw(comparison)), (CSV, csv_text(comparison.as_rows()))):
        (folder / name).write_text(content)
    print(comparison.as_text() + f"picture: {folder / 'comparison.svg'}\n"
          f"as CSV, with the config of each: {folder / CSV}", flush=True)


class ContenderRun(TimedTraining):
    """The training of a contender on this rank, with its measurements."""

    def __init__(self, contender: Contender, job: Job) -> None:
        self.contender, self.job, self.pipe = contender, job, build_pipeline(job)
        self._recorders = tuple(self.pipe.record(RECORDED).values())
        self._fields = tuple(name for stage in self.pipe.stages for name in stage.fields)
        self._warm: Mapping[int, Mapping[int, StageUsage]] | None = None
        super().__init__(contender.name, self._train(), job.updates)

    def _train(self) -> Iterator[float]:
        minutes, pipe = self.job.config.training.max_minutes, self.pipe
        limit_s = float("inf") if minutes is None else 60 * minutes
        for step in pipe.train(self.job.training_batches(self._fields), updates=self.job.updates,
                               stop=lambda: bool(self.warmed_up) and self.seconds > limit_s):
            yield step.loss
            if step.stop:
                break
        for step in pipe.drain():
            yield step.loss

    def warm_up(self, clock: Callable[[], float]) -> None:
        super().warm_up(clock)
        self._warm = self.pipe.local_usage()

    def evaluate(self) -> float:
        """Return the loss on held-out batches, after all updates."""
        return self.pipe.evaluate(self.job.evaluation_batches(self._fields))

    def measured(self) -> list[tuple[int, list[Any]]]:
        """Return for each rank of this process its peak bytes, and its usage: after the warm-up, if there was more."""
        found = []
        usage = self.pipe.local_usage()
        for number, (rank, stages) in enumerate(usage.items()):
            if self._warm is not None and self.counted:
                stages = {stage: used.since(self._warm[rank][stage]) for stage, used in stages.items()}
            found.append((self._peak_bytes(number), list(astuple(StageUsage.of_rank(list(stages.values()))))))
        return found

    def _peak_bytes(self, number: int) -> int:
        """Return the most bytes held at once: weights in all versions, gradients, optimizer state, activations."""
        recorder = self._recorders[number]
        weights, versions, most = recorder.weight_bytes(), dict.fromkeys(recorder.worker.stages, 1), 0
        for note in recorder.pop_records():
            if isinstance(note, RecordedAction):
                versions[note.stage] = max(1, note.versions)
                most = max(most, note.held_bytes + sum(versions[stage] * size for stage, size in weights.items()))
        return most + sum(recorder.static_bytes().values())

    def outcome(self, contender: Contender, job: Job, ranks: Sequence[tuple[int, list[Any]]], evaluation_loss: float,
                efficiency: Efficiency | None) -> Outcome:
        """Return the outcome of ``contender``, of which this is the program.

        Args:
            ranks: what all ranks :meth:`measured`.
        """
        usage = tuple(StageUsage(*used) for _, used in ranks)
        updates = len(self.losses) - (self.warmed_up if self.counted else 0)
        return Outcome(contender, job, tuple(self.losses), self.counted, self.seconds, usage,
                       sum(used.bytes_sent for used in usage) / updates, tuple(size for size, _ in ranks),
                       evaluation_loss, None if efficiency is None else efficiency.with_recompute(self.job.recomputed),
                       None if contender is self.contender else self.contender.name)


def _job_of(contender: Contender, jobs: Mapping[str, Job]) -> Job:
    model = jobs[contender.model]
    return model if contender.plan is None else model.with_plan(contender.plan)


def _build(jobs: Mapping[str, Job], contenders: Sequence[Contender]
           ) -> tuple[dict[str, ContenderRun], dict[str, Problem]]:
    """Build the pipelines; returns by contender its run, or the reason why it has none. Equal programs share a run."""
    runs: dict[str, ContenderRun] = {}
    refused: dict[str, Problem] = {}
    for contender in contenders:
        if contender.problem is not None:
            refused[contender.name] = contender.problem
            continue
        config = jobs[contender.model].config
        try:
            job = _job_of(contender, jobs)
            runs[contender.name] = next((run for run in runs.values() if jobs[run.contender.model].config == config
                                         and run.job.same_program(job)), None) or ContenderRun(contender, job)
        except UserError as error:  # the same on every rank: nothing was sent yet
            refused[contender.name] = error.problems[0]
    return runs, refused


def _title(job: Job) -> str:
    config = job.config
    return (f"{config.model.name}: {counted(len(job.model), 'layer')} on {counted(job.schedule.ranks, 'rank')}, "
            f"{counted(config.dataset.batch_size, 'sample')} per update"
            + ("" if config.training.precision == "fp32" else f", {config.training.precision}"))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Progress:
    """Show a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, runs: Sequence[ContenderRun], show: bool) -> None:
        self.runs, self._show, self._terminal, self._noted = runs, show, sys.stderr.isatty(), perf_counter()
        known = [run.updates for run in runs if run.updates is not None]
        self.bar = tqdm(total=sum(known) if len(known) == len(runs) else None, unit="update", file=sys.stderr,
                        disable=not show or not self._terminal, dynamic_ncols=True,
                        bar_format="{n_fmt}/{total_fmt} |{bar}| {desc} {elapsed}<{remaining}")

    def show(self, run: ContenderRun) -> None:
        timed = run.update_s[run.warmed_up:]
        if not run.losses:
            return
        text = (f"{run.name}: {len(run.losses)}{f'/{run.updates}' if run.updates else ''} updates, "
                f"loss {run.losses[-1]:.3f}")
        if timed:
            text += f", {len(timed) * run.job.samples_per_update / sum(timed):.1f} samples/s"
        self.bar.set_description_str(text, refresh=False)
        self.bar.update(sum(len(run.losses) for run in self.runs) - self.bar.n)
        if run.ended or perf_counter() - self._noted > EVERY_S:
            self.note(text)

    def note(self, line: str) -> None:
        """Print a line where there is no bar."""
        if self._show and not self._terminal:
            self._noted = perf_counter()
            _log(line)
