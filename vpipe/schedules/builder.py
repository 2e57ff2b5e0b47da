"""Build the schedule that a description asks for, by name or as a file: place it, generate it, lower it, prove it.

The generator is called for every rank, and its actions are translated: a rank may hold a replica of a stage.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vpipe.description.cut import Cut, StageSpec, ties_between
from vpipe.description.execution import Execution
from vpipe.description.order import Order, is_path
from vpipe.errors import Problem, UserError, counted
from vpipe.schedules.assignment import Assignment, Placement, Size, default_warmup, passes, stages_of_rank
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.kinds import SAVED, UPDATE, Action, forward
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import Limits, RegisteredSchedule
from vpipe.schedules.rewrites import freeze, recompute_early, reverse_backwards, with_recompute
from vpipe.schedules.schedule import Schedule, peak


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
        schedule = CsvFile.ordered(order, cut, microbatches)
        _check_ranks(schedule.placement, order, cut, processes, meshed)
        if schedule.microbatches % schedule.assignment.per_step:
            raise UserError(f"'{order.schedule}' has {schedule.microbatches} microbatches, but its stages make whole "
                            f"updates together only every {schedule.assignment.per_step}",
                            hint=f"use a multiple of {schedule.assignment.per_step} microbatches")
        return recompute_early(replace(schedule, ties=dict(ties or {})).compute_only(), cut.recomputing)
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
    placement = cut.placement or registered.placement_of(cut.count, order.chunks, cut.replicas, processes)
    _check_ranks(placement, order, cut, processes, meshed)
    return placement


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


def build(name: str, placement: Placement | int, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None, recompute: Collection[int] = (),
          costs: Costs | Callable[[Placement], Costs] | None = None, limits: Limits = None,
          warmup: Sequence[int] | None = None, chunks: int | None = None, slices: int = 1) -> Schedule:
    """Return the schedule ``name`` over ``placement`` with compute actions and steps only.

    Args:
        placement: the ranks of every stage; or how many ranks there are, of the schedule's own placement. For so many
            ranks, a searched schedule takes the best of several placements.
        microbatches: per optimizer step with a flush; of the whole stream without.
        update_every: microbatches per optimizer step, and replica, without a flush; the fewest possible when None.
        ties: see :class:`~vpipe.schedules.schedule.Schedule`.
        recompute: stages that recompute activations.
        costs: the costs that a searched schedule is made for, or their function of the placement; equal ones when None.
        limits: the activations that each rank of a searched schedule may hold.
        warmup: forwards of a replica of every stage before its first backward; those of 1F1B when None.
        chunks: stages per rank, where ``placement`` is a number of ranks; as the schedule chooses when None.
        slices: of every microbatch.

    Raises:
        UserError: the numbers do not fit the schedule.
    """
    registered = RegisteredSchedule.named(name)
    registered.check_slices(slices)
    if isinstance(placement, int) and registered.search is None:
        placement = registered.placement(placement, chunks)
    if isinstance(placement, int):
        assert registered.search is not None
        made = recompute_early(registered.search(placement, microbatches, costs, limits, chunks=chunks), recompute)
    elif registered.search is not None:
        views = replica_views(registered, placement, microbatches, update_every, warmup, slices)
        own = costs(placement) if callable(costs) else costs
        made = recompute_early(_searched(registered, placement, views, microbatches, own, limits), recompute)
    elif limits is not None:
        raise UserError(f"'{name}' has one order, whatever the memory limit of {limits}",
                        hint="leave the limit out, or choose a schedule that keeps one, such as auto")
    else:
        made, program = outline(name, placement, microbatches, update_every, warmup, recompute, slices)
        made = made.with_programs([tuple(program(rank)) for rank in range(made.ranks)])
    return replace(made, name=name, ties=dict(ties or {}))


def outline(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
            warmup: Sequence[int] | None = None, recompute: Collection[int] = (),
            slices: int = 1) -> tuple[Schedule, Callable[[int], Iterator[Action]]]:
    """Return a schedule of fixed order with empty programs, and what generates that of a rank.

    For schedules that are too long to list. The arguments and errors are those of :func:`build`.
    """
    registered = RegisteredSchedule.named(name)
    views = replica_views(registered, placement, microbatches, update_every, warmup, slices)
    indices = microbatches * slices

    def program(rank: int) -> Iterator[Action]:
        if not registered.flush:
            return stream_program(registered, views[rank], outlined.assignment, recompute)
        generated = views[rank].translated(registered.generate(views[rank].rank, views[rank].size))
        return with_recompute(generated, recompute) if recompute else generated

    outlined = Schedule(
        name, placement, ((),) * len(views), indices, indices if registered.flush else views[0].size.update_every,
        registered.flush, tuple(registered.peak_activations(view.rank, view.size) for view in views),
        tuple(max(registered.versions(views[rank].rank, views[rank].size) for rank in ranks) for ranks in placement),
        {}, not registered.flush, () if registered.flush else tuple(views[ranks[0]].warmup for ranks in placement),
        slices=slices)
    if views[0].shared:
        peaks = tuple(peak(program(rank), SAVED) for rank in range(len(views)))
        outlined = replace(outlined, peak_activations=peaks)
    return outlined, program


def build_evaluation(placement: Placement, microbatches: int) -> Schedule:
    """Return the forwards of an evaluation: stage s takes microbatch t - s at tick t.

    Every input of a stage was made one tick before, on whichever rank, so all stages have work at once. Of one tick the
    later stages come first on every rank alike, so that transfers are sent and received in one order.
    """
    ranks, stages = len({rank for ranks in placement for rank in ranks}), len(placement)
    empty = Schedule("evaluation", placement, ((),) * ranks, microbatches, microbatches, True,
                     (microbatches * stages,) * ranks, (1,) * stages, {})
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    for tick in range(microbatches + stages - 1):
        for stage in reversed(range(max(0, tick - microbatches + 1), min(stages, tick + 1))):
            programs[empty.assignment.rank_of(stage, tick - stage)].append(forward(stage, tick - stage))
    return empty.with_programs(programs)


@dataclass(frozen=True)
class ReplicaView:
    """Map a rank of a replicated stage to the unreplicated pipeline that its generator is called for.

    A generator knows pipelines with one rank per position. A replica of a stage with w replicas has every w-th
    microbatch. Before its first backward it must take enough of them to keep all later ranks at work: of R ranks in its
    own and later stages these are (R-1) // w. So the generator is called for a pipeline in which that many positions
    are after the replica. With equally many replicas everywhere, that is its own position among the stages.

    Source of the depths: PipeDream (SOSP 2019), section 3.2.

    A replica gets the slices of a microbatch one after the other, and w of them are at work when (w-1) k slices more
    are ahead. So with unequal replicas of slices the generator is called for a pipeline that is as much deeper, and
    each replica does its part of what one position there does, in that order. As that pipeline goes on, so do they.

    Attributes:
        rank: the position that the generator is called for.
        size: of the pipeline that the generator is called for, with the replica's own microbatches.
        stages: the real number of each of the generator's stages that lives on this rank.
        replica, width: the number of this replica, and how many there are.
        home: the real number of this rank.
        shared: the generator is called for all microbatches of the stage, of which this replica takes its own.
    """

    rank: int
    size: Size
    stages: dict[int, int]
    replica: int
    width: int
    home: int
    shared: bool = False

    @property
    def warmup(self) -> int:
        """Return the forwards of this replica before its first backward."""
        return self.size.warmup_of(self.rank)

    def microbatch_of(self, turn: int) -> int:
        """Return the microbatch that this replica takes in a turn."""
        whole, part = divmod(turn, self.size.slices)
        return Assignment.microbatch_of(whole, self.replica, self.width) * self.size.slices + part

    def endless(self) -> ReplicaView:
        """Return the same view of a stream whose length nobody knows."""
        return replace(self, size=replace(self.size, microbatches=sys.maxsize))

    def translated(self, program: Iterable[Action]) -> Iterator[Action]:
        """Return a generator's actions with the real numbers of stages and microbatches."""
        if self.shared:
            return (Action(action.op, self.stages[action.stage], action.index) for action in program
                    if not action.op.per_microbatch or self.replica == Assignment.replica_of(
                        action.index // self.size.slices, self.width))
        if self.width == 1 and all(real == own for own, real in self.stages.items()):
            return iter(program)
        return (Action(action.op, self.stages.get(action.stage, action.stage),
                       self.microbatch_of(action.index) if action.op.per_microbatch
                       else action.index) for action in program)


def stream_program(registered: RegisteredSchedule, view: ReplicaView, assignment: Assignment,
                   recompute: Collection[int] = ()) -> Iterator[Action]:
    """Yield lazily the compute actions and steps of one rank of a schedule without a flush.

    The generator is called for an endless stream. Its program is prefix-closed
    (:data:`vpipe.schedules.registry.Program`), so leaving out actions at its end changes nothing before them.

    Args:
        recompute: stages that recompute activations.
    """
    stages = stages_of_rank(assignment.placement, view.home)
    completed, stepped = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    latest = -1  # that is known to exist
    generated = view.translated(registered.generate(view.rank, view.endless().size))
    for action in with_recompute(generated, recompute) if recompute else generated:
        needed = _needed(action, assignment)
        if needed <= latest or assignment.has_microbatch(needed):
            latest = max(latest, needed)
            yield action
            if action.op.makes_version:
                stepped[action.stage] += 1
            elif action.op.completes:
                completed[action.stage] += 1
        elif not any(assignment.has_microbatch(assignment.of_rank_at(completed[stage], stage, view.home))
                     or assignment.has_update(stage, stepped[stage]) for stage in stages):
            return


def _needed(action: Action, assignment: Assignment) -> int:
    """Return a microbatch without which there is no such action; -1 if there always is."""
    if action.op.counts == UPDATE:
        return action.index * assignment.per_update(action.stage)
    if action.op.chooses:
        return (action.index - 1) * assignment.per_update(action.stage) if action.index else -1
    return action.index


def replica_views(registered: RegisteredSchedule, placement: Placement, microbatches: int,
                  update_every: int | None, warmup: Sequence[int] | None = None,
                  slices: int = 1) -> tuple[ReplicaView, ...]:
    """Return the view of every rank of a schedule over ``placement``, which may name the ranks in any order.

    ``warmup`` are the forwards of every stage before its first backward; those of 1F1B when None.

    Raises:
        UserError: the schedule cannot have this placement or these numbers.
    """
    if not placement or microbatches < 1:
        raise UserError(f"{counted(len(placement), 'stage')} and {counted(microbatches, 'microbatch')}",
                        hint="a pipeline needs at least one of each")
    if warmup is not None:
        registered.check_warmup(list(map(len, placement)), warmup)
    chunks, groups, own_ranks = _groups(registered, placement)
    widths = [len(group) for group in groups]
    most = max(map(len, placement))
    if registered.flush and microbatches < most:
        stage = list(map(len, placement)).index(most)
        raise UserError(f"{counted(most, 'replica')} of stage {stage} for "
                        f"{counted(microbatches, 'microbatch')}: some would have nothing to do",
                        hint=f"use {most} microbatches or more, or fewer replicas")
    even = len(set(widths)) == 1
    shared = slices > 1 and not even
    # The replicas of the first stage may have the fewest ranks after them: 2-1-1 is as deep as its second stage.
    after = tuple(sum((width - 1) * slices + 1 for width in widths[position:]) - 1
                  for position in range(len(widths))) if shared else default_warmup(widths)
    depth = max(after) + 1
    ahead = after if warmup is None or not registered.any_warmup else tuple(warmup)
    every = registered.updates_every(microbatches, update_every, max(ahead) + 1, ahead == after)
    views: dict[int, ReplicaView] = {}
    by_rank = dict(zip(own_ranks, ahead, strict=True))
    own_ahead = tuple(by_rank[rank] for rank in range(depth)) if even else ()
    for position, group in enumerate(groups):
        own_rank = own_ranks[position] if even else depth - 1 - after[position]
        stages = {} if even else {own_rank: position}
        if not even:  # a generator's pipeline has other stages only where all have equally many replicas
            own_ahead = tuple(ahead[position] if number == own_rank else depth - 1 - number for number in range(depth))
        for replica, rank in enumerate(group):
            own = microbatches if shared else Assignment.turns_of(microbatches, replica, len(group))
            size = Size(depth, own, chunks, own if registered.flush else every, even, own_ahead, slices)
            if (problem := registered.requires(size)) is not None:
                raise UserError.all_of([problem if len(group) == 1 or not size.even else Problem(
                    f"a replica of the pipeline takes {own} of {counted(microbatches, 'microbatch')}: {problem.what}",
                    f"for each of the {len(group)} replicas, {problem.hint}")])
            views[rank] = ReplicaView(own_rank, size, stages, replica, len(group), rank, shared)
    return tuple(views[rank] for rank in sorted(views))


def _groups(registered: RegisteredSchedule, placement: Placement) -> tuple[int, list[tuple[int, ...]], list[int]]:
    """Return the stages per rank that a microbatch passes, the groups of replicas, and the generator's rank of each.

    The groups stand in the order in which microbatches first come to them; with copies of stages, by their ranks.

    Raises:
        UserError: the schedule cannot have this placement.
    """
    for group in placement:
        if twice := [rank for rank, times in Counter(group).items() if times > 1]:
            raise UserError(f"rank {twice[0]} stands twice among the ranks {list(group)} of a stage",
                            hint="name each rank once")
    stages, copies = len(placement), registered.places_copies(len(placement))
    numbers = {group: number for number, group in enumerate(dict.fromkeys(placement))}
    for chunks in range(1, stages + 1) if registered.any_chunks else (registered.chunks,):
        ranks, left = divmod(stages, chunks)
        if left or not (copies or ranks == len(numbers)):
            continue
        own = registered.placement(ranks, chunks) if registered.search is None else tuple(
            (numbers[group],) for group in placement)
        if (found := _matched(placement, own)) is None:
            continue
        own_ranks, uneven = sorted(found) if copies else list(found), len(set(map(len, found.values()))) > 1
        if not uneven or (chunks == 1 and registered.search is None and own_ranks == list(range(ranks)) and not copies):
            return chunks, [found[rank] for rank in own_ranks], own_ranks
        if not copies:
            raise UserError(f"'{registered.name}' has equally many replicas of every stage, not "
                            f"{', '.join(str(len(ranks)) for ranks in placement)}", hint="give all stages equally "
                            f"many, or take a schedule with one stage per rank, such as {RegisteredSchedule.DEFAULT} "
                            f"or {RegisteredSchedule.DEFAULT_ASYNCHRONOUS}")
    ranks, left = divmod(stages, registered.chunks)
    shown = registered.placement(ranks + (left > 0), registered.chunks)
    raise UserError(f"'{registered.name}' does not place stages as {list(map(list, placement))}",
                    hint=f"place them as {list(map(list, shown))}, or with equally many replicas for every rank")


def _matched(placement: Placement, own: Placement) -> dict[int, tuple[int, ...]] | None:
    """Return the ranks that stand for each rank of ``own`` in a placement that is ``own`` with replicas; else None."""
    found: dict[int, tuple[int, ...]] = {}
    for group, ranks in zip(placement, own, strict=True):
        width, left = divmod(len(group), len(ranks))
        parts = [group[number * width:(number + 1) * width] for number in range(len(ranks))]
        if left or any(found.setdefault(rank, part) != part for rank, part in zip(ranks, parts, strict=True)):
            return None
    everyone = [rank for part in found.values() for rank in part]
    return found if len(everyone) == len(set(everyone)) else None


def _searched(registered: RegisteredSchedule, placement: Placement, views: Sequence[ReplicaView], microbatches: int,
              costs: Costs | None, limits: Limits) -> Schedule:
    """Search an order for one replica of every stage, and give it to all replicas."""
    assert registered.search is not None
    groups = sorted(set(placement))  # so that an unreplicated rank keeps the number that costs and limits know
    alone = tuple((groups.index(ranks),) for ranks in placement)
    orders = {own: registered.search(alone, own, costs, limits) for own in {view.size.microbatches for view in views}}
    position = {rank: index for index, group in enumerate(groups) for rank in group}
    programs, peaks = [], []
    for rank, view in enumerate(views):
        order = orders[view.size.microbatches]
        programs.append(tuple(view.translated(order.programs[position[rank]])))
        peaks.append(order.peak_activations[position[rank]])
    first = orders[views[placement[0][0]].size.microbatches]
    return replace(first, placement=placement, programs=tuple(programs), microbatches=microbatches,
                   update_every=microbatches, peak_activations=tuple(peaks))
