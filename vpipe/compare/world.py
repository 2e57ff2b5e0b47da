"""One rank's part in a comparison: agree on who takes part, take turns, tell what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from tqdm import tqdm

from vpipe.compare.entry import Entry, Field
from vpipe.compare.outcome import Comparison, Outcome
from vpipe.compare.picture import draw
from vpipe.compare.rows import rows
from vpipe.compare.table import text
from vpipe.compare.turns import Course, take_turns
from vpipe.errors import PlanningError, Problem, UserError, counted
from vpipe.pipeline import Pipeline
from vpipe.profiling.world import World
from vpipe.runtime.collectives import LocalUsage
from vpipe.runtime.step_results import Step
from vpipe.runtime.trace import Recorded, Recorder
from vpipe.runtime.transport.process_groups import control_group
from vpipe.runtime.usage import StageUsage
from vpipe.train.csv_rows import csv_text
from vpipe.train.device import device_of, join
from vpipe.train.efficiency import Efficiency
from vpipe.train.job import Job
from vpipe.train.loop import build

RECORDED = 20_000
"""Actions per rank of which the memory is looked at: what a pipeline holds at most, it holds soon."""
EVERY_S = 5.0
"""Between two lines of progress where there is no terminal."""
_NO_UPDATE = Problem("made no update", "give more samples, epochs or minutes")
CSV = "comparison.csv"
FILES = ("comparison.json", "comparison.svg", CSV)


def compare(job: Job, folder: Path, field_of: Callable[[World], Field]) -> None:
    """Compare; rank 0 shows progress and the table, and writes ``comparison.json``, ``comparison.svg`` and
    ``comparison.csv``.

    All ranks call this.

    Args:
        job: the config's; what it says of schedule, partition, recompute and microbatches gives way.
        field_of: who takes part; called on every rank once they have joined, but rank 0's answer counts.

    Raises:
        PlanningError: nobody can take part.
    """
    config = job.config
    torch.set_num_threads(config.training.threads)
    join(config)
    world = World(device_of(config))
    entered = Field.of_json(world.share(field_of(world).as_json())[0])
    contenders: list[Contender] = []
    twins: list[tuple[Entry, Contender]] = []  # the same program as one before
    refused = dict(entered.refused)
    for entry in entered.entries:
        try:
            own = job.planned(entry.plan)
            twin = next((one for one in contenders if one.job.same_program(own)), None)
            if twin is None:
                contenders.append(Contender.of(own, entry))
            else:
                twins.append((entry, twin))
        except UserError as error:  # the same on every rank: nothing was sent yet
            refused[entry.name] = error.problems[0]
    if not contenders:
        raise PlanningError.all_of([Problem(f"nobody can take part: {name}: {why.what}", why.hint)
                                    for name, why in refused.items()])
    efficiency = Efficiency.of(job)
    with _Progress(contenders, world.rank == 0) as progress:
        take_turns([contender.course for contender in contenders],
                   lambda: None if world.ranks == 1 else dist.barrier(control_group()), perf_counter,
                   progress.show, warmed=lambda: _mark(contenders))
        for contender in contenders:
            if not contender.course.losses:  # on no rank
                refused |= {entry.name: _NO_UPDATE for entry in (contender.entry, *(
                    entry for entry, twin in twins if twin is contender))}
        contenders = [contender for contender in contenders if contender.course.losses]
        if not contenders:
            raise PlanningError("nobody made an update", hint=_NO_UPDATE.hint)
        progress.note("evaluating")
        losses = [contender.evaluate() for contender in contenders]
    measured = world.share([contender.measured() for contender in contenders])
    if world.rank:
        return
    found = {contender.entry.name: (contender, contender.outcome(list(chain.from_iterable(ranks)), loss))
             for contender, ranks, loss in zip(contenders, zip(*measured, strict=True), losses, strict=True)}
    for entry, twin in twins:
        if twin.entry.name in found:
            found[entry.name] = twin, replace(found[twin.entry.name][1], name=entry.name, words=entry.words,
                                              largest_size=entry.largest_size, same_as=twin.entry.name)
    ran, outcomes = zip(*(found[entry.name] for entry in entered.entries if entry.name in found), strict=True)
    comparison = Comparison(
        f"{config.model.name}: {counted(len(job.model), 'layer')} on {counted(job.schedule.ranks, 'rank')}, "
        f"{counted(config.dataset.batch_size, 'sample')} per update"
        + ("" if config.training.precision == "fp32" else f", {config.training.precision}"),
        entered.memory_bytes, outcomes, {name: why.what for name, why in refused.items()})
    content = (json.dumps(comparison.as_json(), indent=1) + "\n", draw(comparison),
               csv_text(rows(comparison, [contender.job for contender in ran], efficiency)))
    for name, written in zip(FILES, content, strict=True):
        (folder / name).write_text(written)
    print(text(comparison) + f"picture: {folder / FILES[1]}\nas CSV, with the config of each: {folder / CSV}",
          flush=True)


@dataclass(frozen=True)
class Contender:
    """One of those that take turns, on this rank.

    Attributes:
        warm: when it was warm, where the time had gone until then; empty before.
    """

    entry: Entry
    job: Job
    pipe: Pipeline
    course: Course
    recorders: Sequence[Recorder]
    warm: list[LocalUsage] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, entry: Entry) -> Contender:
        """Cut and built; nothing has run yet.

        Args:
            job: as the plan of the entry says.

        Raises:
            UserError: it cannot be built.
        """
        pipe = build(job)
        course = Course(entry.name, iter(()), job.updates)
        course.steps = _losses(job, pipe, course)
        return cls(entry, job, pipe, course, tuple(pipe.engine.record(RECORDED).values()))

    def evaluate(self) -> float:
        """The loss on held-out batches, after all updates."""
        return self.pipe.evaluate(self.job.evaluation_batches(_fields(self.pipe)))

    def measured(self) -> list[tuple[int, float, float]]:
        """For each rank of this process the bytes that it kept at most, and the seconds that it waited for others and
        worked: of those after the warm-up, if there were any."""
        found = []
        before = self.warm[0] if self.course.counted else {}
        for recorder, (rank, stages) in zip(self.recorders, self.usage().items(), strict=True):
            spent = StageUsage.of_rank([usage.since(before[rank][stage]) if before else usage
                                        for stage, usage in stages.items()])
            found.append((_peak_bytes(recorder), spent.idle_s, spent.working_s))
        return found

    def usage(self) -> LocalUsage:
        """Where its time went so far, of the ranks of this process."""
        return self.pipe.engine.all_ranks.local_usage()

    def outcome(self, ranks: Sequence[tuple[int, float, float]], evaluation_loss: float) -> Outcome:
        """All that is known of it."""
        plan, job = self.entry.plan, self.job
        return Outcome(
            self.entry.name, self.entry.words, self.pipe.schedule, job.partition, tuple(map(len, job.recomputed)),
            job.config.microbatch_size, job.schedule.rounds.per_step, plan.predictions, tuple(self.course.losses),
            self.course.counted, tuple((waited, worked) for _, waited, worked in ranks),
            tuple(size for size, *_ in ranks), evaluation_loss, self.entry.largest_size)


def _mark(contenders: Sequence[Contender]) -> None:
    for contender in contenders:
        contender.warm.append(contender.usage())


def _losses(job: Job, pipe: Pipeline, course: Course) -> Iterator[float]:
    minutes = job.config.training.max_minutes
    limit_s = float("inf") if minutes is None else 60 * minutes
    step: Step
    for step in pipe.engine.train(job.training_batches(_fields(pipe)), job.updates, lambda: course.seconds > limit_s):
        yield step.loss
        if step.stop:
            break
    for step in pipe.engine.drain():
        yield step.loss


def _fields(pipe: Pipeline) -> tuple[str, ...]:
    return tuple(name for stage in pipe.engine.local_stages for name in stage.spec.fields)


def _peak_bytes(recorder: Recorder) -> int:
    """Weights in all their versions, gradients, the optimizer's state, and what was kept for backwards."""
    weights, held, most = recorder.weight_bytes(), dict.fromkeys(recorder.worker.stages, 1), 0
    for note in recorder.take():
        if isinstance(note, Recorded):
            held[note.stage] = max(1, note.versions)
            most = max(most, note.held_bytes + sum(held[stage] * size for stage, size in weights.items()))
    return most + sum(recorder.static_bytes().values())


class _Progress:
    """A bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, contenders: Sequence[Contender], show: bool) -> None:
        self._show, self._terminal, self._said = show, sys.stderr.isatty(), perf_counter()
        self._samples = {c.course.name: c.job.samples_per_update for c in contenders}
        self._updates = {c.course.name: c.job.updates for c in contenders}
        self._done = dict.fromkeys(self._samples, 0)
        known = [updates for updates in self._updates.values() if updates is not None]
        self._bar = tqdm(total=sum(known) if len(known) == len(contenders) else None, unit="update", file=sys.stderr,
                         disable=not show or not self._terminal, dynamic_ncols=True,
                         bar_format="{n_fmt}/{total_fmt} |{bar}| {desc} {elapsed}<{remaining}")

    def show(self, course: Course) -> None:
        """After a turn."""
        made, total = len(course.losses), self._updates[course.name]
        if not made:
            return
        said = f"{course.name}: {made}{f'/{total}' if total else ''} updates, loss {course.losses[-1]:.3f}"
        if after := made - course.warmed.updates:
            pace = after * self._samples[course.name] / (course.seconds - course.warmed.seconds)
            said += f", {pace:.1f} samples/s"
        self._bar.set_description_str(said, refresh=False)
        self._bar.update(made - self._done[course.name])
        self._done[course.name] = made
        if not self._terminal and (course.ended or perf_counter() - self._said > EVERY_S):
            self.note(said)

    def note(self, line: str) -> None:
        """A line where there is no bar."""
        if self._show and not self._terminal:
            self._said = perf_counter()
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.close()
