"""From a description to programs: build the schedule that a user asks for, by name or as a file, lower it, prove it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from vpipe.description.cut import Cut, StageSpec, ties_between
from vpipe.description.execution import Execution
from vpipe.description.order import Order, is_path
from vpipe.errors import UserError, counted
from vpipe.schedules.assignment import Assignment, Placement, passes, widened
from vpipe.schedules.builder import build, check_no_warmup, freeze, replica_views, reverse_backwards, with_recompute
from vpipe.schedules.checker import check
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule


class Divisible(Protocol):
    """What has layers: a model."""

    def split(self, partition: Sequence[int]) -> Sequence[StageSpec]:
        """Return the stages of so many layers each."""


def prepare_schedule(model: Divisible | None, cut: Cut, order: Order, microbatches: int, execution: Execution, *,
                     needs_norms: bool, zero1: bool = False, ranks: int | None = None,
                     proved: bool = False) -> Schedule:
    """Return the lowered and proved schedule that a pipeline of these parts runs.

    Args:
        model: None where only the ranks matter: then the schedule exchanges no weights that stages share.
        cut: with the layers of every stage.
        needs_norms: whether an update depends on the norms of gradients.
        zero1: whether each replica of a stage steps a part of its parameters.
        ranks: how many processes there are; None where the schedule says it.
        proved: whether another process proves the same schedule at the same time.

    Raises:
        UserError: the parts do not fit each other.
    """
    if execution.threaded and (refused := RegisteredSchedule.threads_refused(order.schedule)):
        raise UserError(f"the executor is {execution.executor}, {refused[0]}", hint=refused[1])
    found = {} if model is None else ties_between(model.split(cut.partition))
    ties = {owner: tuple(borrowers) for owner, borrowers in found.items()}
    schedule = described(order, cut, microbatches, ranks, ties, meshed=execution.mesh is not None)
    if execution.threaded:
        schedule = reverse_backwards(schedule)
    if execution.data is not None and not schedule.flush:
        raise UserError(f"'{schedule.name}' has no flush, but weights that fully_shard divides have one version",
                        hint="choose a schedule with a flush, such as 1f1b, or replicas in place of fully_shard")
    # Without a flush a stage knows its norms by itself, unless each replica has a part of them.
    schedule = lower(schedule, needs_norms and (schedule.flush or zero1), execution.data is not None, zero1)
    if not proved:
        check(schedule)
    if execution.backend is not None and schedule.split_backwards:
        raise UserError(f"'{schedule.name}' splits every backward: it intercepts the operations that take a weight, "
                        "and a compiled layer shows none",
                        hint="choose a schedule with whole backwards, such as 1f1b or interleaved, or do not compile")
    if execution.backend is not None and schedule.offloaded_stages:
        raise UserError(f"'{schedule.name}' offloads activations, and a compiled layer saves its own way",
                        hint="leave OFFLOAD out of the schedule, or do not compile")
    return replace(schedule)  # without its graph, which takes more memory than the actions


def described(order: Order, cut: Cut, microbatches: int, processes: int | None = None,
              ties: Mapping[int, tuple[int, ...]] | None = None, *, meshed: bool = False) -> Schedule:
    """Return the schedule that a description asks for, of compute actions; of a stream the part that proves it.

    Args:
        microbatches: per batch.
        processes: how many there are; as many as the schedule has ranks when None.
        ties: stages that borrow a stage's tied weights, by owning stage.
        meshed: the processes are those along a dimension of a mesh.

    Raises:
        UserError: the numbers do not fit each other or the schedule.
    """
    for name, value, most in (
            ("stages", cut.count, Schedule.MOST_STAGES), ("chunks", order.chunks, Schedule.MOST_STAGES),
            ("ranks", cut.ranks, Schedule.MOST_RANKS), ("microbatches", microbatches, Schedule.MOST_MICROBATCHES),
            ("slices", order.slices, Schedule.MOST_MICROBATCHES),
            ("update_every", order.update_every, Schedule.MOST_MICROBATCHES)):
        if isinstance(value, int) and value > most:  # before any list is made of them
            raise UserError(f"{name} is {value}", hint=f"give {most:,} at most")
    if is_path(order.schedule):
        schedule = _from_file(order, cut, microbatches)
        _check_ranks(schedule.placement, order, cut, processes, meshed)
        if schedule.microbatches % schedule.assignment.per_step:
            raise UserError(f"'{order.schedule}' has {schedule.microbatches} microbatches, but its stages make whole "
                            f"updates together only every {schedule.assignment.per_step}",
                            hint=f"use a multiple of {schedule.assignment.per_step} microbatches")
        compute = replace(schedule, ties=dict(ties or {})).compute_only()
        return compute.with_programs([list(with_recompute(program, cut.recomputing)) for program in compute.programs])
    registered = RegisteredSchedule.named(order.schedule)
    registered.check_chunks(order.chunks)
    slices = order.slices or 1
    registered.check_slices(slices)
    placement = placed(registered, order, cut, processes, meshed=meshed)
    views = replica_views(registered, placement, microbatches, order.update_every, order.warmup)
    size, why = views[placement[0][0]].size, ""
    if not registered.flush:
        # The part of a stream that is proved: see vpipe.schedules.checker.check.
        per_step = Assignment(placement, size.update_every, False, lambda microbatch: True).per_step
        deepest = max(size.stages, size.ranks, *(view.warmup + 1 for view in views)) * max(map(len, placement))
        microbatches = 4 * -(-deepest // per_step) * per_step
        why = f", which prove a stream of '{registered.name}',"
    Schedule.check_work(len(views), microbatches * slices, passes(placement, placement[0][0]),
                        replicated=max(map(len, placement)) > 1, why=why)
    return build(order.schedule, placement, microbatches, None if registered.flush else size.update_every, ties,
                 cut.recomputing, warmup=order.warmup, slices=slices)


def placed(registered: RegisteredSchedule, order: Order, cut: Cut, processes: int | None = None, *,
           meshed: bool = False) -> Placement:
    """Return the ranks of every stage: those that the cut lists, or as the schedule places so many stages.

    Raises:
        UserError: the ranks are not numbered without a gap, or are others than the processes.
    """
    placement = _placement_of(registered, order, cut, processes) if cut.placement is None else cut.placement
    _check_ranks(placement, order, cut, processes, meshed)
    return placement


def _placement_of(registered: RegisteredSchedule, order: Order, cut: Cut, processes: int | None) -> Placement:
    """Return the ranks of every stage as the schedule places so many stages."""
    stages, chunks, replicas = cut.count, order.chunks, cut.replicas
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
    if ranks * replicas > Schedule.MOST_RANKS:
        raise UserError(f"{replicas} replicas of {counted(ranks, 'rank')} are {ranks * replicas:,} ranks",
                        hint=f"use {Schedule.MOST_RANKS:,} ranks at most")
    return widened(registered.placement(ranks, chunks), replicas)


def _check_ranks(placement: Placement, order: Order, cut: Cut, processes: int | None, meshed: bool) -> None:
    """Refuse a placement whose ranks are not numbered, or are others than the processes."""
    used = sorted({rank for ranks in placement for rank in ranks})
    given = [list(ranks) for ranks in placement]
    if empty := [stage for stage, ranks in enumerate(placement) if not ranks]:
        raise UserError(f"the placement {given} gives stage {empty[0]} no rank",
                        hint="list the ranks of every stage, at least one")
    if len(placement) != cut.count:
        raise UserError(f"the placement {given} is one of {counted(len(placement), 'stage')}, but there are "
                        f"{cut.count}", hint="list the ranks of every stage")
    if used[0] < 0:
        raise UserError(f"the placement {given} names rank {used[0]}", hint="number the ranks from 0 without a gap")
    if (missing := next((number for number, rank in enumerate(used) if number != rank), None)) is not None:
        raise UserError(f"the placement {given} names ranks up to {used[-1]}, but never rank {missing}",
                        hint="number the ranks from 0 without a gap")
    for rank in used if order.chunks is not None else ():
        if order.chunks != (count := passes(placement, rank)):
            raise UserError(f"chunks is {order.chunks}, but the placement puts {counted(count, 'stage')} on "
                            f"rank {rank}", hint="leave chunks out: it follows from the placement")
    if processes is None or processes == len(used):
        return
    there, start = counted(processes, "process"), f"start {counted(len(used), 'process')}"
    if meshed:
        there = f"{counted(processes, 'rank')} along 'pp' of the mesh"
        start = f"give 'pp' {counted(len(used), 'rank')}"
    widths = [len(ranks) for ranks in placement]
    if max(widths) > 1:
        raise UserError(f"{there} for {counted(len(used), 'rank')}: the stages have "
                        f"{', '.join(map(str, widths))} replicas", hint=f"{start}, or change the replicas")
    per_rank = cut.count // len(used)
    more = "" if meshed or processes % len(used) else (
        "; where other ranks share its layers, give Execution(mesh=mesh), of which 'pp' has "
        f"{counted(len(used), 'rank')}")
    raise UserError(f"{there} for {counted(cut.count, 'stage')}, of which '{order.schedule}' holds "
                    f"{per_rank} on each rank",
                    hint=f"{start}, or cut the model into {counted(processes * per_rank, 'stage')}{more}")


def _from_file(order: Order, cut: Cut, microbatches: int) -> Schedule:
    """Read a schedule, and refuse other numbers than it has."""
    file, update_every = order.schedule, order.update_every
    schedule = replace(CsvFile.read(file).schedule, slices=order.slices or 1)
    for word, asked, there in (("stages", cut.count, schedule.stages),
                               ("microbatches" if schedule.slices == 1 else "slices",
                                microbatches * schedule.slices, schedule.microbatches),
                               ("microbatches per update", update_every or schedule.update_every,
                                schedule.update_every)):
        if asked != there:
            raise UserError(f"'{file}' is a schedule of {there} {word}, not {asked}",
                            hint=f"use {there} {word}, or another schedule")
    check_no_warmup(file, order.warmup)
    if cut.replicas > 1:
        raise UserError(f"{cut.replicas} replicas of the pipeline, but '{file}' says which ranks "
                        "there are", hint="leave the replicas out, or take a schedule by its name")
    if cut.placement not in (None, schedule.placement):
        raise UserError(f"'{file}' places the stages as {[list(r) for r in schedule.placement]}, not as "
                        f"{[list(r) for r in cut.placement or ()]}", hint="leave the placement out")
    return schedule


def proved(schedule: Schedule, *exchanges: bool) -> Schedule:
    """Return a schedule of compute actions lowered for ``exchanges`` (:func:`~.lowering.lower`), and proved.

    Raises:
        CheckError: a rule is broken.
    """
    lowered = lower(schedule, *exchanges)
    check(lowered)
    return lowered


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
    schedule = proved(replace(freeze(lowered.compute_only(), frozen), ties=kept), at.normed, at.sharded, at.zero1)
    return replace(schedule)  # without its graph
