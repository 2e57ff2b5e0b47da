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
from vpipe.schedules.order import Schedule, check_chunks, size_of, stages_of_rank
from vpipe.schedules.recompute import with_recompute
from vpipe.schedules.registry import Limits, recipe_named
from vpipe.schedules.simulation.costs import Costs
from vpipe.schedules.size import Placement


def is_file(schedule: str) -> bool:
    """Whether a schedule is given as a file, not by name."""
    return isinstance(schedule, str) and schedule.endswith(".csv")  # what is no text is refused as a name


def has_flush(schedule: str) -> bool:
    """Whether the pipeline is empty at every optimizer step."""
    return _read(schedule).flush if is_file(schedule) else recipe_named(schedule).flush


def _read(path: str) -> Schedule:
    try:
        state = os.stat(path)
    except OSError:
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
        update_every: microbatches per update without a flush; as few as can be when None.
        placement: ranks per stage; by the schedule when None.
        chunks: stages per rank; by the schedule and ``ranks`` when None.
        ranks: how many there are; as many as the schedule needs when None.
        ties: borrowing stages by owning stage.
        recompute: stages that recompute activations.
        norm: whether gradients are clipped by the norm over all stages.
        costs: what a searched schedule is made for; equal ones when None.
        limits: what each rank of a searched schedule may hold.
    """

    schedule: str
    stages: int
    microbatches: int
    update_every: int | None = None
    placement: Placement | None = None
    chunks: int | None = None
    ranks: int | None = None
    ties: Mapping[int, tuple[int, ...]] | None = None
    recompute: Collection[int] = ()
    norm: bool = False
    costs: Costs | None = None
    limits: Limits = None

    def arranged(self) -> Schedule:
        """The schedule: lowered, and proved right before a process is started.

        Raises:
            UserError: the numbers do not fit; :class:`~vpipe.errors.CheckError` when a rule is broken.
        """
        return self._from_file() if is_file(self.schedule) else self._by_name()

    def _by_name(self) -> Schedule:
        recipe = recipe_named(self.schedule)
        check_chunks(recipe, self.chunks)
        placement = self.placement or self._placement()
        self._check_ranks(placement)
        size = size_of(recipe, placement, self.microbatches, self.update_every)
        # A stream has no end: what holds for its warm-up and a few rounds of its steady state holds for the rest.
        rounds = -(-size.stages // size.update_every)
        microbatches = self.microbatches if recipe.flush else 4 * rounds * size.update_every
        return prove(self.schedule, placement, microbatches, None if recipe.flush else size.update_every, self.ties,
                     self.norm and recipe.flush, self.recompute, self.costs, self.limits)

    def _placement(self) -> Placement:
        recipe = recipe_named(self.schedule)
        chunks = self.chunks
        if chunks is None:
            free = recipe.any_chunks and self.ranks is not None and self.stages % self.ranks == 0
            chunks = self.stages // self.ranks if free and self.ranks is not None else recipe.chunks
        ranks, left = divmod(self.stages, chunks)
        if left:
            low, high = ranks * chunks, (ranks + 1) * chunks
            raise UserError(f"'{self.schedule}' holds {chunks} stages on each rank, which do not divide "
                            f"{counted(self.stages, 'stage')}",
                            hint=f"use {f'{low} or ' if low else ''}{high} stages")
        return recipe.layout.placement(ranks, chunks)

    def _check_ranks(self, placement: Placement) -> None:
        held = sorted({rank for ranks in placement for rank in ranks})
        if any(len(ranks) != 1 for ranks in placement):
            raise UserError(f"the placement {[list(ranks) for ranks in placement]} does not give every stage one rank",
                            hint="list one rank per stage: replicated stages are not available in this version")
        if len(placement) != self.stages or held != list(range(len(held))):
            raise UserError(f"the placement {[list(ranks) for ranks in placement]} does not give each of "
                            f"{self.stages} stages a rank, with ranks 0 to {max(held, default=0)} all in use",
                            hint="list one rank per stage, and number the ranks from 0 without a gap")
        for rank in held:
            if self.chunks not in (None, count := len(stages_of_rank(placement, rank))):
                raise UserError(f"chunks is {self.chunks}, but the placement puts "
                                f"{counted(count, 'stage')} on rank {rank}", hint="leave chunks out: the placement "
                                "says it")
        if self.ranks is not None and self.ranks != len(held):
            per_rank = self.stages // len(held)
            raise UserError(f"{counted(self.ranks, 'process')} for {counted(self.stages, 'stage')}, of which "
                            f"'{self.schedule}' holds {per_rank} on each rank",
                            hint=f"start {counted(len(held), 'process')}, or cut the model into "
                                 f"{counted(self.ranks * per_rank, 'stage')}")

    def _from_file(self) -> Schedule:
        schedule = _read(self.schedule)
        for word, asked, there in (("stages", self.stages, schedule.stages),
                                   ("microbatches", self.microbatches, schedule.microbatches),
                                   ("microbatches per update", self.update_every or schedule.update_every,
                                    schedule.update_every)):
            if asked != there:
                raise UserError(f"'{self.schedule}' is a schedule of {there} {word}, not {asked}",
                                hint=f"use {there} {word}, or another schedule")
        if self.placement not in (None, schedule.placement):
            raise UserError(f"'{self.schedule}' places the stages as {[list(r) for r in schedule.placement]}, not as "
                            f"{[list(r) for r in self.placement or ()]}", hint="leave the placement out")
        self._check_ranks(schedule.placement)
        compute = compute_only(replace(schedule, ties=dict(self.ties or {})))
        early = compute.with_programs([list(with_recompute(iter(program), self.recompute))
                                       for program in compute.programs])
        lowered = lower(early, self.norm and schedule.flush)
        check(lowered)
        return lowered
