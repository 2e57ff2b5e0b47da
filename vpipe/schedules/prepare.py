"""Prepare the schedule that a user asks for, by name or as a file, for a run: build it, lower it and prove it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from vpipe.errors import UserError, counted
from vpipe.schedules.build import check_chunks, replica_views
from vpipe.schedules.check import check, lowered, prove
from vpipe.schedules.costs import Costs
from vpipe.schedules.csv_format import read_csv
from vpipe.schedules.lower import lower
from vpipe.schedules.passes import compute_only, with_recompute
from vpipe.schedules.registry import Limits, recipe_named
from vpipe.schedules.replication import Rounds
from vpipe.schedules.schedule import Schedule, stages_of_rank
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
    """Tell whether a schedule is given as a file, not by name."""
    return isinstance(schedule, str) and schedule.endswith(".csv")  # what is no text is refused as a name


def has_flush(schedule: str) -> bool:
    """Tell whether the pipeline is empty at every optimizer step."""
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
class ScheduleSpec:
    """Specify a schedule.

    Attributes:
        schedule: a registered name, or the path of a CSV file.
        stages: of the whole model.
        microbatches: per batch.
        update_every: microbatches per update, and replica, without a flush; the fewest possible when None.
        placement: ranks per stage; the schedule's own when None.
        chunks: stages per rank; from the schedule and ``ranks`` when None.
        ranks: how many there are; as many as the schedule needs when None.
        replicas: of the whole pipeline; 1 with a placement, which contains them.
        ties: borrowing stages by owning stage.
        recompute: stages that recompute activations.
        norm: clip gradients by the norm over all stages.
        costs: the costs that a searched schedule is made for; equal ones when None.
        limits: the activations that each rank of a searched schedule may hold.
        last_first: run the backwards from the last microbatch to the first, see
            :func:`~vpipe.schedules.passes.reverse_backwards`.
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

    def prepare(self, *, proved: bool = False) -> Schedule:
        """Return the schedule, lowered and proved, before any process is started.

        Args:
            proved: another process has proved the same schedule: it is built and lowered only.

        Raises:
            UserError: the numbers do not fit; :class:`~vpipe.errors.CheckError` when a rule is broken.
        """
        self._check_sizes()
        return self._from_file(proved) if is_file(self.schedule) else self._by_name(proved)

    def _check_sizes(self) -> None:
        """Refuse numbers that are too large before any list is made of them."""
        for name, value, most in (("stages", self.stages, MOST_STAGES), ("chunks", self.chunks, MOST_STAGES),
                                  ("replicas", self.replicas, MOST_RANKS),
                                  ("microbatches", self.microbatches, MOST_MICROBATCHES),
                                  ("update_every", self.update_every, MOST_MICROBATCHES)):
            if isinstance(value, int) and value > most:
                raise UserError(f"{name} is {value}", hint=f"give {most:,} at most")

    def _by_name(self, proved: bool) -> Schedule:
        recipe = recipe_named(self.schedule)
        check_chunks(recipe, self.chunks)
        if type(self.replicas) is not int or self.replicas < 1:
            raise UserError(f"replicas is {self.replicas!r}", hint="give a whole number, 1 or more")
        if self.replicas > 1 and self.placement:
            raise UserError(f"{self.replicas} replicas beside the placement {[list(r) for r in self.placement]}",
                            hint="leave the replicas out: the placement says them")
        placement = self.placement or self._placement()
        self._check_ranks(placement)
        size = replica_views(recipe, placement, self.microbatches, self.update_every)[placement[0][0]].size
        every = None if recipe.flush else size.update_every
        to_prove = self._to_prove(placement, size, every)
        positions = set(placement)
        check_work(sum(map(len, positions)), to_prove, len(placement) // len(positions),
                   replicated=max(map(len, positions)) > 1,
                   why="" if every is None else f", which prove a stream of '{self.schedule}',")
        construct = lowered if proved else prove
        return construct(self.schedule, placement, to_prove, every, self.ties,
                         self.norm and recipe.flush, self.recompute, self.costs, self.limits, self.last_first)

    def _to_prove(self, placement: Placement, size: Size, every: int | None) -> int:
        """Return the microbatches of a batch, or of enough of a stream.

        A stream has no end. What holds for its warm-up and a few repetitions of its steady state holds for the rest.
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
        used = sorted({rank for ranks in placement for rank in ranks})
        given = [list(ranks) for ranks in placement]
        if empty := [stage for stage, ranks in enumerate(placement) if not ranks]:
            raise UserError(f"the placement {given} gives stage {empty[0]} no rank",
                            hint="list the ranks of every stage, at least one")
        if len(placement) != self.stages:
            raise UserError(f"the placement {given} is one of {counted(len(placement), 'stage')}, but there are "
                            f"{self.stages}", hint="list the ranks of every stage")
        if used[0] < 0:
            raise UserError(f"the placement {given} names rank {used[0]}", hint="number the ranks from 0 without a gap")
        if (missing := first_missing(used)) < used[-1]:
            raise UserError(f"the placement {given} names ranks up to {used[-1]}, but never rank {missing}",
                            hint="number the ranks from 0 without a gap")
        for rank in used if self.chunks is not None else ():
            if self.chunks != (count := len(stages_of_rank(placement, rank))):
                raise UserError(f"chunks is {self.chunks}, but the placement puts "
                                f"{counted(count, 'stage')} on rank {rank}", hint="leave chunks out: the placement "
                                "says it")
        if self.ranks is not None and self.ranks != len(used):
            raise self._wrong_processes(self.ranks, placement, len(used))

    def _wrong_processes(self, processes: int, placement: Placement, needed: int) -> UserError:
        widths = [len(ranks) for ranks in placement]
        start = f"start {counted(needed, 'process')}"
        if max(widths) > 1:
            return UserError(f"{counted(processes, 'process')} for {counted(needed, 'rank')}: the stages have "
                             f"{', '.join(map(str, widths))} replicas", hint=f"{start}, or change the replicas")
        per_rank = self.stages // needed
        return UserError(f"{counted(processes, 'process')} for {counted(self.stages, 'stage')}, of which "
                         f"'{self.schedule}' holds {per_rank} on each rank",
                         hint=f"{start}, or cut the model into {counted(processes * per_rank, 'stage')}")

    def _from_file(self, proved: bool) -> Schedule:
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
        schedule = lower(early, self.norm and schedule.flush)
        if not proved:
            check(schedule)
        return schedule
