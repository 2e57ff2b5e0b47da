"""From what a user asks for, a schedule's name or file and some numbers, to what can be run: lowered and proved."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from vpipe.errors import UserError, counted
from vpipe.schedules.check import check, prove
from vpipe.schedules.csv_file import compute_only, read_csv
from vpipe.schedules.lower import lower
from vpipe.schedules.order import Schedule, check_chunks, stages_of_rank
from vpipe.schedules.recompute import with_recompute
from vpipe.schedules.registry import Limits, recipe_named
from vpipe.schedules.rounds import Rounds
from vpipe.schedules.seat import seats
from vpipe.schedules.simulation.costs import Costs
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


def is_file(schedule: str) -> bool:
    """Whether a schedule is given as a file, not by name."""
    return isinstance(schedule, str) and schedule.endswith(".csv")  # what is no text is refused as a name


def has_flush(schedule: str) -> bool:
    """Whether the pipeline is empty at every optimizer step."""
    return _read(schedule).flush if is_file(schedule) else recipe_named(schedule).flush


def _read(path: str) -> Schedule:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return read_csv(Path(path))  # says what is wrong
    return _read_once(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _read_once(path: str, modified_ns: int, size_bytes: int) -> Schedule:
    return read_csv(Path(path))


@dataclass(frozen=True)
class Wanted:
    """What to arrange.

    Attributes:
        schedule: a name that :func:`~vpipe.schedules.registry.recipe_named` knows, or the path of a CSV file.
        stages: of the whole model.
        microbatches: per batch.
        update_every: microbatches per update, and replica, without a flush; as few as can be when None.
        placement: ranks per stage; by the schedule when None.
        chunks: stages per rank; by the schedule and ``ranks`` when None.
        ranks: how many there are; as many as the schedule needs when None.
        replicas: of the whole pipeline; with a placement, which says them, 1.
        ties: borrowing stages by owning stage.
        recompute: stages that recompute activations.
        norm: whether gradients are clipped by the norm over all stages.
        costs: what a searched schedule is made for; equal ones when None.
        limits: what each rank of a searched schedule may hold.
        last_first: whether its backwards run from the last microbatch to the first; see
            :mod:`vpipe.schedules.reversal`.
    """

    schedule: str
    stages: int
    microbatches: int
    update_every: int | None = None
    placement: Placement | None = None
    chunks: int | None = None
    ranks: int | None = None
    replicas: int = 1
    ties: Mapping[int, tuple[int, ...]] | None = None
    recompute: Collection[int] = ()
    norm: bool = False
    costs: Costs | None = None
    limits: Limits = None
    last_first: bool = False

    def arranged(self) -> Schedule:
        """The schedule: lowered, and proved right before a process is started.

        Raises:
            UserError: the numbers do not fit; :class:`~vpipe.errors.CheckError` when a rule is broken.
        """
        self._check_sizes()
        return self._from_file() if is_file(self.schedule) else self._by_name()

    def _check_sizes(self) -> None:
        """Refuse numbers of which lists would be made that nobody could use."""
        for name, value, most in (("stages", self.stages, MOST_STAGES), ("chunks", self.chunks, MOST_STAGES),
                                  ("replicas", self.replicas, MOST_RANKS),
                                  ("microbatches", self.microbatches, MOST_MICROBATCHES),
                                  ("update_every", self.update_every, MOST_MICROBATCHES)):
            if isinstance(value, int) and value > most:
                raise UserError(f"{name} is {value}", hint=f"give {most:,} at most")

    def _by_name(self) -> Schedule:
        recipe = recipe_named(self.schedule)
        check_chunks(recipe, self.chunks)
        if type(self.replicas) is not int or self.replicas < 1:
            raise UserError(f"replicas is {self.replicas!r}", hint="give a whole number, 1 or more")
        if self.replicas > 1 and self.placement:
            raise UserError(f"{self.replicas} replicas beside the placement {[list(r) for r in self.placement]}",
                            hint="leave the replicas out: the placement says them")
        placement = self.placement or self._placement()
        self._check_ranks(placement)
        seat = seats(recipe, placement, self.microbatches, self.update_every)[placement[0][0]]
        every = None if recipe.flush else seat.size.update_every
        to_prove = self._to_prove(placement, seat.size, every)
        positions = set(placement)
        check_work(sum(map(len, positions)), to_prove, len(placement) // len(positions),
                   replicated=max(map(len, positions)) > 1,
                   why="" if every is None else f", which prove a stream of '{self.schedule}',")
        return prove(self.schedule, placement, to_prove, every, self.ties,
                     self.norm and recipe.flush, self.recompute, self.costs, self.limits, self.last_first)

    def _to_prove(self, placement: Placement, size: Size, every: int | None) -> int:
        """The microbatches of a batch, or of a stream so many that what holds for them holds for all.

        A stream has no end: what holds for its warm-up and a few repetitions of its steady state holds for the rest.
        """
        if every is None:
            return self.microbatches
        per_step = Rounds(placement, every, False, lambda microbatch: True).per_step
        deepest = max(size.stages, size.ranks) * max(map(len, placement))
        return 4 * -(-deepest // per_step) * per_step

    def _placement(self) -> Placement:
        recipe = recipe_named(self.schedule)
        chunks = self.chunks
        if self.ranks is not None and self.ranks % self.replicas:
            raise UserError(f"{counted(self.ranks, 'process')} for {counted(self.replicas, 'replica')} of the pipeline",
                            hint=f"start a multiple of {counted(self.replicas, 'process')}")
        ranks_of_one = None if self.ranks is None else self.ranks // self.replicas
        if chunks is None:
            free = recipe.any_chunks and ranks_of_one is not None and self.stages % ranks_of_one == 0
            chunks = self.stages // ranks_of_one if free and ranks_of_one is not None else recipe.chunks
        ranks, left = divmod(self.stages, chunks)
        if left:
            low, high = ranks * chunks, (ranks + 1) * chunks
            raise UserError(f"'{self.schedule}' holds {chunks} stages on each rank, which do not divide "
                            f"{counted(self.stages, 'stage')}",
                            hint=f"use {f'{low} or ' if low else ''}{high} stages")
        if ranks * self.replicas > MOST_RANKS:
            raise UserError(f"{self.replicas} replicas of {counted(ranks, 'rank')} are {ranks * self.replicas:,} ranks",
                            hint=f"use {MOST_RANKS:,} ranks at most")
        return widened(recipe.layout.placement(ranks, chunks), self.replicas)

    def _check_ranks(self, placement: Placement) -> None:
        held = sorted({rank for ranks in placement for rank in ranks})
        said = [list(ranks) for ranks in placement]
        if empty := [stage for stage, ranks in enumerate(placement) if not ranks]:
            raise UserError(f"the placement {said} gives stage {empty[0]} no rank",
                            hint="list the ranks of every stage, at least one")
        if len(placement) != self.stages:
            raise UserError(f"the placement {said} is one of {counted(len(placement), 'stage')}, but there are "
                            f"{self.stages}", hint="list the ranks of every stage")
        if held[0] < 0:
            raise UserError(f"the placement {said} names rank {held[0]}", hint="number the ranks from 0 without a gap")
        if (missing := first_missing(held)) < held[-1]:
            raise UserError(f"the placement {said} names ranks up to {held[-1]}, but never rank {missing}",
                            hint="number the ranks from 0 without a gap")
        for rank in held if self.chunks is not None else ():
            if self.chunks != (count := len(stages_of_rank(placement, rank))):
                raise UserError(f"chunks is {self.chunks}, but the placement puts "
                                f"{counted(count, 'stage')} on rank {rank}", hint="leave chunks out: the placement "
                                "says it")
        if self.ranks is not None and self.ranks != len(held):
            raise self._wrong_processes(self.ranks, placement, len(held))

    def _wrong_processes(self, processes: int, placement: Placement, held: int) -> UserError:
        widths = [len(ranks) for ranks in placement]
        start = f"start {counted(held, 'process')}"
        if max(widths) > 1:
            return UserError(f"{counted(processes, 'process')} for {counted(held, 'rank')}: the stages have "
                             f"{', '.join(map(str, widths))} replicas", hint=f"{start}, or change the replicas")
        per_rank = self.stages // held
        return UserError(f"{counted(processes, 'process')} for {counted(self.stages, 'stage')}, of which "
                         f"'{self.schedule}' holds {per_rank} on each rank",
                         hint=f"{start}, or cut the model into {counted(processes * per_rank, 'stage')}")

    def _from_file(self) -> Schedule:
        schedule = _read(self.schedule)
        for word, asked, there in (("stages", self.stages, schedule.stages),
                                   ("microbatches", self.microbatches, schedule.microbatches),
                                   ("microbatches per update", self.update_every or schedule.update_every,
                                    schedule.update_every)):
            if asked != there:
                raise UserError(f"'{self.schedule}' is a schedule of {there} {word}, not {asked}",
                                hint=f"use {there} {word}, or another schedule")
        if self.replicas > 1:
            raise UserError(f"{self.replicas} replicas of the pipeline, but '{self.schedule}' says which ranks there "
                            "are", hint="leave the replicas out, or take a schedule by its name")
        if self.placement not in (None, schedule.placement):
            raise UserError(f"'{self.schedule}' places the stages as {[list(r) for r in schedule.placement]}, not as "
                            f"{[list(r) for r in self.placement or ()]}", hint="leave the placement out")
        self._check_ranks(schedule.placement)
        if schedule.microbatches % schedule.rounds.per_step:
            raise UserError(f"'{self.schedule}' has {schedule.microbatches} microbatches, but its stages make whole "
                            f"updates together only every {schedule.rounds.per_step}",
                            hint=f"use a multiple of {schedule.rounds.per_step} microbatches")
        compute = compute_only(replace(schedule, ties=dict(self.ties or {})))
        early = compute.with_programs([list(with_recompute(iter(program), self.recompute))
                                       for program in compute.programs])
        lowered = lower(early, self.norm and schedule.flush)
        check(lowered)
        return lowered
