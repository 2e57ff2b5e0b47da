"""Prepare the schedule that a user asks for, by name or as a file, for a run: build it, lower it and prove it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vpipe.description.cut import Cut
from vpipe.description.order import Order
from vpipe.errors import UserError, counted
from vpipe.schedules.assignment import Assignment, passes
from vpipe.schedules.builder import build, check_no_warmup, freeze, replica_views, reverse_backwards, with_recompute
from vpipe.schedules.checker import check
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
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


@dataclass(frozen=True)
class ScheduleSpec:
    """Specify a schedule."""

    order: Order  # the schedule
    cut: Cut  # the stages of the whole model
    microbatches: int  # per batch
    processes: int | None = None  # how many there are; as many as the schedule has ranks when None
    ties: Mapping[int, tuple[int, ...]] | None = None  # borrowing stages by owning stage
    norm: bool = False  # clip gradients by the norm over all stages; without a flush, by that of each
    sharded: bool = False  # the weights of stages are divided over lanes
    last_first: bool = False  # run the backwards from the last microbatch to the first: builder.reverse_backwards
    zero1: bool = False  # each replica of a stage steps a part of its parameters
    meshed: bool = False  # the processes are those along a dimension of a mesh

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
                                  ("slices", self.order.slices, MOST_MICROBATCHES),
                                  ("update_every", self.order.late.update_every, MOST_MICROBATCHES)):
            if isinstance(value, int) and value > most:  # before any list is made of them
                raise UserError(f"{name} is {value}", hint=f"give {most:,} at most")
        built = self._from_file() if CsvFile.is_path(self.order.schedule) else self._by_name(
            RegisteredSchedule.named(self.order.schedule))
        if self.sharded and not built.flush:
            raise UserError(f"'{built.name}' has no flush, but weights that fully_shard divides have one version",
                            hint="choose a schedule with a flush, such as 1f1b, or replicas in place of fully_shard")
        # Without a flush a stage knows its norms by itself, unless each replica has a part of them.
        schedule = lower(built, self.norm and (built.flush or self.zero1), self.sharded, self.zero1)
        if not proved:
            check(schedule)
        return schedule

    def _by_name(self, registered: RegisteredSchedule) -> Schedule:
        registered.check_chunks(self.order.chunks)
        slices = self.order.slices or 1
        registered.check_slices(slices)
        placement = self.cut.placement or self.placement(registered)
        self._check_ranks(placement)
        if self.order.warmup is not None:
            registered.check_warmup(list(map(len, placement)), self.order.warmup)
        warmup = self.order.warmup if registered.any_warmup else None
        views = replica_views(registered, placement, self.microbatches, self.order.late.update_every, warmup)
        size = views[placement[0][0]].size
        every = None if registered.flush else size.update_every
        deepest = max(view.warmup for view in views) + 1
        to_prove = self.microbatches if every is None else _part_of_stream(placement, size, deepest)
        ranks, widest = {rank for group in placement for rank in group}, max(map(len, placement))
        check_work(len(ranks), to_prove * slices, passes(placement, placement[0][0]), replicated=widest > 1,
                   why="" if every is None else f", which prove a stream of '{registered.name}',")
        schedule = build(self.order.schedule, placement, to_prove, every, self.ties, self.recompute, warmup=warmup,
                         slices=slices)
        return reverse_backwards(schedule) if self.last_first else schedule

    def placement(self, registered: RegisteredSchedule) -> Placement:
        """Return the schedule's own placement of so many stages, for a cut that does not list their ranks."""
        stages, chunks, replicas, processes = self.cut.count, self.order.chunks, self.cut.replicas, self.processes
        if processes is not None and processes % replicas:
            raise UserError(f"{counted(processes, 'process')} for {counted(replicas, 'replica')} of the pipeline",
                            hint=f"start a multiple of {counted(replicas, 'process')}")
        if chunks is None:
            fitting = registered.any_chunks and processes is not None and stages % (processes // replicas) == 0
            chunks = stages // (processes // replicas) if fitting and processes else registered.chunks
        ranks, left = divmod(stages, chunks)
        if left:
            low, high = ranks * chunks, (ranks + 1) * chunks
            raise UserError(f"'{registered.name}' holds {chunks} stages on each rank, which do not divide "
                            f"{counted(stages, 'stage')}",
                            hint=f"use {f'{low} or ' if low else ''}{high} stages")
        if ranks * replicas > MOST_RANKS:
            raise UserError(f"{replicas} replicas of {counted(ranks, 'rank')} are {ranks * replicas:,} ranks",
                            hint=f"use {MOST_RANKS:,} ranks at most")
        return widened(registered.placement(ranks, chunks), replicas)

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
        count = self.processes or 0
        processes, start = counted(count, "process"), f"start {counted(len(used), 'process')}"
        if self.meshed:
            processes = f"{counted(count, 'rank')} along 'pp' of the mesh"
            start = f"give 'pp' {counted(len(used), 'rank')}"
        widths = [len(ranks) for ranks in placement]
        if max(widths) > 1:
            raise UserError(f"{processes} for {counted(len(used), 'rank')}: the stages have "
                            f"{', '.join(map(str, widths))} replicas", hint=f"{start}, or change the replicas")
        per_rank = self.cut.count // len(used)
        more = "" if self.meshed or count % len(used) else (
            "; where other ranks share its layers, give Execution(mesh=mesh), of which 'pp' has "
            f"{counted(len(used), 'rank')}")
        raise UserError(f"{processes} for {counted(self.cut.count, 'stage')}, of which '{self.order.schedule}' holds "
                        f"{per_rank} on each rank",
                        hint=f"{start}, or cut the model into {counted(count * per_rank, 'stage')}{more}")

    def _from_file(self) -> Schedule:
        file, update_every = self.order.schedule, self.order.late.update_every
        schedule = replace(CsvFile.read(file).schedule, slices=self.order.slices or 1)
        for word, asked, there in (("stages", self.cut.count, schedule.stages),
                                   ("microbatches" if schedule.slices == 1 else "slices",
                                    self.microbatches * schedule.slices, schedule.microbatches),
                                   ("microbatches per update", update_every or schedule.update_every,
                                    schedule.update_every)):
            if asked != there:
                raise UserError(f"'{file}' is a schedule of {there} {word}, not {asked}",
                                hint=f"use {there} {word}, or another schedule")
        check_no_warmup(file, self.order.warmup)
        if self.cut.replicas > 1:
            raise UserError(f"{self.cut.replicas} replicas of the pipeline, but '{file}' says which ranks "
                            "there are", hint="leave the replicas out, or take a schedule by its name")
        if self.cut.placement not in (None, schedule.placement):
            raise UserError(f"'{file}' places the stages as {[list(r) for r in schedule.placement]}, not as "
                            f"{[list(r) for r in self.cut.placement or ()]}", hint="leave the placement out")
        self._check_ranks(schedule.placement)
        if schedule.microbatches % schedule.assignment.per_step:
            raise UserError(f"'{file}' has {schedule.microbatches} microbatches, but its stages make whole "
                            f"updates together only every {schedule.assignment.per_step}",
                            hint=f"use a multiple of {schedule.assignment.per_step} microbatches")
        compute = replace(schedule, ties=dict(self.ties or {})).compute_only()
        return compute.with_programs([list(with_recompute(program, self.recompute)) for program in compute.programs])


def with_frozen(lowered: Schedule, frozen: int, ties: Mapping[int, Iterable[int]] | None = None) -> Schedule:
    """Return a lowered schedule for a pipeline whose first ``frozen`` stages train nothing, lowered and proved again.

    What knows that only when the stages are built prepares a schedule without it. One that divides weights over lanes,
    or has actions of packages, which may need a gradient, keeps its backwards: those of such stages are empty.

    Args:
        ties: borrowing stages by owning stage, of weights that are trained; None where they are as they were.
    """
    at, kept = lowered.setting, dict(lowered.ties)
    kept = kept if ties is None else {owner: tuple(borrowers) for owner, borrowers in ties.items()}
    if at.sharded or not all(kind.is_own for kind in lowered.kinds):
        frozen = 0
    if not frozen and kept == lowered.ties:
        return lowered
    schedule = lower(replace(freeze(lowered.compute_only(), frozen), ties=kept), at.normed, at.sharded, at.zero1)
    check(schedule)
    return schedule


def _part_of_stream(placement: Placement, size: Size, in_flight: int) -> int:
    """Return the microbatches of the part of a stream that is proved; see :func:`~vpipe.schedules.checker.check`.

    Args:
        in_flight: the most microbatches in flight on a rank.
    """
    per_step = Assignment(placement, size.update_every, False, lambda microbatch: True).per_step
    deepest = max(size.stages, size.ranks, in_flight) * max(map(len, placement))
    return 4 * -(-deepest // per_step) * per_step
