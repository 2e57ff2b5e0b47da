"""Prepare the schedule that a user asks for, by name or as a file, for a run: build it, lower it and prove it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from vpipe.description.cut import Cut
from vpipe.description.order import Order
from vpipe.errors import UserError, counted
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.build import (
    build,
    check_chunks,
    check_no_warmup,
    check_warmup,
    placement_of,
    replica_views,
    reverse_backwards,
    with_recompute,
)
from vpipe.schedules.check import check
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.csv_format import CsvFile, read_csv_file
from vpipe.schedules.lower import lower
from vpipe.schedules.peaks import recomputations
from vpipe.schedules.registry import Recipe, recipe_if_any, recipe_named
from vpipe.schedules.schedule import Schedule, passes
from vpipe.schedules.simulator.simulate import simulate
from vpipe.schedules.size import (
    MOST_MICROBATCHES,
    MOST_RANKS,
    MOST_STAGES,
    Placement,
    Size,
    check_work,
    first_missing,
    widened,
)

MOST_SIMULATED = 10_000
"""Actions that are simulated for a warning, in a third of a second; the bubble of larger schedules is not given."""

ENOUGH = 4
"""Proposed microbatches per stage: with 1F1B they leave a bubble of less than a fifth."""


def is_file(schedule: str) -> bool:
    """Tell whether a schedule is given as a file, not by name."""
    return isinstance(schedule, str) and schedule.endswith(".csv")  # anything but text is refused as a name


def note_of(schedule: str) -> str | None:
    """Return in words what of a schedule's file is left out; None for nothing, and for a name."""
    return _read(schedule).note if is_file(schedule) else None


def has_flush(schedule: str) -> bool:
    """Tell whether the pipeline is empty at every optimizer step."""
    return _read(schedule).schedule.flush if is_file(schedule) else recipe_named(schedule).flush


def microbatches_of(path: str) -> int:
    """Return the microbatches of a batch in a schedule that is given as a file."""
    return _read(path).schedule.microbatches


def _read(path: str) -> CsvFile:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return read_csv_file(Path(path))  # its error explains the path
    return _read_once(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read_once(path: str, modified_ns: int, size_bytes: int) -> CsvFile:
    return read_csv_file(Path(path))


@dataclass(frozen=True)
class ScheduleSpec:
    """Specify a schedule.

    Attributes:
        order: the schedule.
        cut: the stages of the whole model.
        microbatches: per batch.
        processes: how many there are; as many as the schedule has ranks when None.
        ties: borrowing stages by owning stage.
        norm: clip gradients by the norm over all stages.
        last_first: run the backwards from the last microbatch to the first, see
            :func:`~vpipe.schedules.build.reverse_backwards`.
    """

    order: Order
    cut: Cut
    microbatches: int
    processes: int | None = None
    ties: Mapping[int, tuple[int, ...]] | None = None
    norm: bool = False
    last_first: bool = False

    @property
    def schedule(self) -> str:
        """Its name, or the path of a file."""
        return self.order.schedule

    @property
    def update_every(self) -> int | None:
        """Microbatches per update, and replica, without a flush; the fewest possible when None."""
        return self.order.late.update_every

    @property
    def recompute(self) -> list[int]:
        """The stages that recompute activations."""
        return [stage for stage, layers in enumerate(self.cut.recomputed) if layers]

    def prepare(self, *, proved: bool = False) -> Schedule:
        """Return the schedule, lowered and proved, before any process is started.

        Args:
            proved: another process has proved the same schedule: it is built and lowered only.

        Raises:
            UserError: the numbers do not fit; :class:`~vpipe.errors.CheckError` when a rule is broken.
        """
        for name, value, most in (("stages", self.cut.count, MOST_STAGES), ("chunks", self.order.chunks, MOST_STAGES),
                                  ("ranks", self.cut.ranks, MOST_RANKS),
                                  ("microbatches", self.microbatches, MOST_MICROBATCHES),
                                  ("update_every", self.update_every, MOST_MICROBATCHES)):
            if isinstance(value, int) and value > most:  # before any list is made of them
                raise UserError(f"{name} is {value}", hint=f"give {most:,} at most")
        built = self._from_file() if is_file(self.schedule) else self._by_name(
            recipe_named(self.schedule))
        schedule = lower(built, self.norm and built.flush)
        if not proved:
            check(schedule)
        return schedule

    def _by_name(self, recipe: Recipe) -> Schedule:
        check_chunks(recipe, self.order.chunks)
        placement = self.cut.placement or self._placement(recipe)
        self._check_ranks(placement)
        if self.order.warmup is not None:
            check_warmup(recipe, list(map(len, placement)), self.order.warmup)
        warmup = self.order.warmup if recipe.any_warmup else None
        views = replica_views(recipe, placement, self.microbatches, self.update_every, warmup)
        size = views[placement[0][0]].size
        every = None if recipe.flush else size.update_every
        deepest = max(view.warmup for view in views) + 1
        to_prove = self.microbatches if every is None else _part_of_stream(placement, size, deepest)
        ranks, widest = {rank for group in placement for rank in group}, max(map(len, placement))
        check_work(len(ranks), to_prove, passes(placement, placement[0][0]), replicated=widest > 1,
                   why="" if every is None else f", which prove a stream of '{recipe.name}',")
        schedule = build(self.schedule, placement, to_prove, every, self.ties, self.recompute, warmup=warmup)
        return reverse_backwards(schedule) if self.last_first else schedule

    def _placement(self, recipe: Recipe) -> Placement:
        stages, chunks, replicas, processes = self.cut.count, self.order.chunks, self.cut.replicas, self.processes
        if processes is not None and processes % replicas:
            raise UserError(f"{counted(processes, 'process')} for {counted(replicas, 'replica')} of the pipeline",
                            hint=f"start a multiple of {counted(replicas, 'process')}")
        if chunks is None:
            fitting = recipe.any_chunks and processes is not None and stages % (processes // replicas) == 0
            chunks = stages // (processes // replicas) if fitting and processes else recipe.chunks
        ranks, left = divmod(stages, chunks)
        if left:
            low, high = ranks * chunks, (ranks + 1) * chunks
            raise UserError(f"'{recipe.name}' holds {chunks} stages on each rank, which do not divide "
                            f"{counted(stages, 'stage')}",
                            hint=f"use {f'{low} or ' if low else ''}{high} stages")
        if ranks * replicas > MOST_RANKS:
            raise UserError(f"{replicas} replicas of {counted(ranks, 'rank')} are {ranks * replicas:,} ranks",
                            hint=f"use {MOST_RANKS:,} ranks at most")
        return widened(placement_of(recipe, ranks, chunks), replicas)

    def _check_ranks(self, placement: Placement) -> None:
        used = sorted({rank for ranks in placement for rank in ranks})
        given = [list(ranks) for ranks in placement]
        if empty := [stage for stage, ranks in enumerate(placement) if not ranks]:
            raise UserError(f"the placement {given} gives stage {empty[0]} no rank",
                            hint="list the ranks of every stage, at least one")
        if len(placement) != self.cut.count:
            raise UserError(f"the placement {given} is one of {counted(len(placement), 'stage')}, but there are "
                            f"{self.cut.count}", hint="list the ranks of every stage")
        if used[0] < 0:
            raise UserError(f"the placement {given} names rank {used[0]}", hint="number the ranks from 0 without a gap")
        if (missing := first_missing(used)) < used[-1]:
            raise UserError(f"the placement {given} names ranks up to {used[-1]}, but never rank {missing}",
                            hint="number the ranks from 0 without a gap")
        for rank in used if self.order.chunks is not None else ():
            if self.order.chunks != (count := passes(placement, rank)):
                raise UserError(f"chunks is {self.order.chunks}, but the placement puts {counted(count, 'stage')} on "
                                f"rank {rank}", hint="leave chunks out: it follows from the placement")
        if self.processes in (None, len(used)):
            return
        processes, start = counted(self.processes or 0, "process"), f"start {counted(len(used), 'process')}"
        widths = [len(ranks) for ranks in placement]
        if max(widths) > 1:
            raise UserError(f"{processes} for {counted(len(used), 'rank')}: the stages have "
                            f"{', '.join(map(str, widths))} replicas", hint=f"{start}, or change the replicas")
        per_rank = self.cut.count // len(used)
        raise UserError(f"{processes} for {counted(self.cut.count, 'stage')}, of which '{self.schedule}' holds "
                        f"{per_rank} on each rank",
                        hint=f"{start}, or cut the model into {counted((self.processes or 0) * per_rank, 'stage')}")

    def _from_file(self) -> Schedule:
        schedule = _read(self.schedule).schedule
        for word, asked, there in (("stages", self.cut.count, schedule.stages),
                                   ("microbatches", self.microbatches, schedule.microbatches),
                                   ("microbatches per update", self.update_every or schedule.update_every,
                                    schedule.update_every)):
            if asked != there:
                raise UserError(f"'{self.schedule}' is a schedule of {there} {word}, not {asked}",
                                hint=f"use {there} {word}, or another schedule")
        check_no_warmup(self.schedule, self.order.warmup)
        if self.cut.replicas > 1:
            raise UserError(f"{self.cut.replicas} replicas of the pipeline, but '{self.schedule}' says which ranks "
                            "there are", hint="leave the replicas out, or take a schedule by its name")
        if self.cut.placement not in (None, schedule.placement):
            raise UserError(f"'{self.schedule}' places the stages as {[list(r) for r in schedule.placement]}, not as "
                            f"{[list(r) for r in self.cut.placement or ()]}", hint="leave the placement out")
        self._check_ranks(schedule.placement)
        if schedule.microbatches % schedule.assignment.per_step:
            raise UserError(f"'{self.schedule}' has {schedule.microbatches} microbatches, but its stages make whole "
                            f"updates together only every {schedule.assignment.per_step}",
                            hint=f"use a multiple of {schedule.assignment.per_step} microbatches")
        compute = replace(schedule, ties=dict(self.ties or {})).compute_only()
        return compute.with_programs([list(with_recompute(program, self.recompute)) for program in compute.programs])


def _part_of_stream(placement: Placement, size: Size, in_flight: int) -> int:
    """Return the microbatches of the part of a stream that is proved; see :func:`~vpipe.schedules.check.prove`.

    Args:
        in_flight: the most microbatches in flight on a rank.
    """
    per_step = Assignment(placement, size.update_every, False, lambda microbatch: True).per_step
    deepest = max(size.stages, size.ranks, in_flight) * max(map(len, placement))
    return 4 * -(-deepest // per_step) * per_step


def few_microbatches(schedule: Schedule, key: str, batch: int | None = None) -> str | None:
    """Return a warning where a schedule with a flush has fewer microbatches than ranks, so that some always wait.

    The ranks are those that a microbatch passes, times the replicas among which microbatches are divided.

    Args:
        schedule: with or without its transfers.
        key: the user's name of the number of microbatches.
        batch: samples of a batch, which the microbatches must divide; None where it is unknown.
    """
    depth = len(set(map(frozenset, schedule.placement)))  # copies on the same ranks need no more microbatches
    width, count = max(map(len, schedule.placement)), schedule.microbatches
    if not schedule.flush or count >= depth * width:
        return None
    stages = counted(schedule.stages, "stage") + (f" with {width} replicas" if width > 1 else "")
    left = "ranks without work"
    if sum(map(len, schedule.programs)) <= MOST_SIMULATED:
        left = f"a bubble of {_bubble(schedule)} with {schedule.name}, where all stages take equally long"
    remedy = _more_microbatches(schedule, ENOUGH * depth * width, key, batch)
    return f"{counted(count, 'microbatch')} for {stages} leave{'s' * (count == 1)} {left}; {remedy}"


def _more_microbatches(schedule: Schedule, wanted: int, key: str, batch: int | None) -> str:
    fitting = [count for count in range(wanted, schedule.microbatches, -1) if batch is None or batch % count == 0]
    recipe = recipe_if_any(schedule.name)
    if not fitting:
        return f"raise dataset.batch_size, which is {batch}, and {key}"
    if recipe is None or recipe.search is not None:
        return f"raise {key}, at best to {fitting[0]}"
    for count in fitting:
        if 3 * count * schedule.stages > MOST_SIMULATED:
            return f"raise {key}, at best to {count}"
        with suppress(UserError):  # not every schedule takes every number
            return f"{key} {count} would leave {_bubble(build(schedule.name, schedule.placement, count))}"
    return f"raise {key}"


def _bubble(schedule: Schedule) -> str:
    """Return the share of the time from a rank's first start to its last end in which it waits, at equal stages."""
    computed = schedule.compute_only()
    early = {stage for program in computed.programs for stage, _ in recomputations(program)}
    costs = Costs(tuple(StageCosts(1, 1, 1, recompute_s=int(stage in early)) for stage in range(schedule.stages)))
    return f"{100 * float(simulate(computed, costs).bubble_share):.0f} %"
