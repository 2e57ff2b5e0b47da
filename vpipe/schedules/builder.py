"""Build a schedule from its registered name: call the generator for every rank and translate its actions."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vpipe.errors import Problem, UserError, VpipeError, counted
from vpipe.schedules.assignment import Assignment, Placement, Size, default_warmup, stages_of_rank
from vpipe.schedules.costs import Costs
from vpipe.schedules.kinds import SAVED, UPDATE, Action, Op, forward
from vpipe.schedules.registry import Limits, RegisteredSchedule
from vpipe.schedules.schedule import Schedule, peak


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
        found = registered.search(placement, microbatches, costs, limits, chunks=chunks)
        made = found.with_programs([list(with_recompute(program, recompute)) for program in found.programs])
    elif registered.search is not None:
        views = replica_views(registered, placement, microbatches, update_every, warmup, slices)
        made = _searched(registered, placement, views, microbatches, recompute,
                         costs(placement) if callable(costs) else costs, limits)
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
        return with_recompute(views[rank].translated(_generated(registered, views[rank])), recompute)

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
    for action in with_recompute(view.translated(_generated(registered, view.endless())), recompute):
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
    every = _update_every(registered, max(ahead) + 1, microbatches, update_every, ahead == after)
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


def check_no_warmup(file: str, warmup: Sequence[int] | None) -> None:
    """Refuse forwards before the first backward for a schedule that is read from a file."""
    if warmup is not None:
        raise UserError(f"warmup_depth is {list(warmup)}, but '{file}' says the order of its actions",
                        hint="leave warmup_depth out, or take a schedule by its name")


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


def _update_every(registered: RegisteredSchedule, depth: int, microbatches: int, update_every: int | None,
                  default: bool) -> int:
    """Return the microbatches per update, and replica; the fewest that the schedule can have when None.

    Args:
        depth: the most microbatches in flight at a stage: as many as ranks in a row by ``default``.
    """
    if registered.flush:
        if update_every not in (None, microbatches):
            raise UserError(f"update_every is {update_every}, but '{registered.name}' updates once per batch of "
                            f"{counted(microbatches, 'microbatch')}", hint="leave update_every out, or choose a "
                            f"schedule without a flush, such as {RegisteredSchedule.DEFAULT_ASYNCHRONOUS}")
        return microbatches
    least = registered.update_every(depth)
    fitting = [n for n in range(1, microbatches + 1) if microbatches % n == 0 and n >= least]
    where = f"on {counted(depth, 'rank')}" if default else f"with {counted(depth, 'microbatch')} in flight at a stage"
    if not fitting:
        raise UserError(f"'{registered.name}' {where} updates every {least} microbatches or more, "
                        f"but there are only {microbatches}", hint=f"use {least} microbatches or more, or "
                        + ("fewer ranks" if default else "a lower warmup_depth"))
    every = fitting[0] if update_every is None else update_every
    if every not in fitting:
        why = (f"is less than the {least} that '{registered.name}' needs {where}" if 0 < every < least
               else f"does not divide {counted(microbatches, 'microbatch')}")
        raise UserError(f"update_every is {every}, which {why}", hint=f"choose one of {fitting}")
    return every


def _generated(registered: RegisteredSchedule, view: ReplicaView) -> Iterator[Action]:
    """Yield what the generator of a schedule yields for a view.

    Raises:
        UserError: the generator takes other arguments, fails, or yields something that is no action.
    """
    rank, size = view.rank, view.size
    arguments = {"rank": rank, "ranks": size.ranks, "microbatches": size.microbatches}
    options: dict[str, object] = {"chunks": size.chunks} if registered.any_chunks else {}
    if not registered.flush:
        options["update_every"] = size.update_every
    if registered.any_warmup:
        options["warmup"] = size.warmup
    if registered.sliced:
        options["slices"] = size.slices
    try:
        inspect.signature(registered.program).bind(*arguments.values(), **options)
    except TypeError as error:
        names = ", ".join((*arguments, *options))
        raise UserError(f"schedule '{registered.name}' does not take {names}: {error}",
                        hint=f"define its generator with the parameters ({names})") from error
    hint = "yield actions: forward(stage, microbatch), backward(stage, microbatch), step(stage, update), ..."
    try:
        actions = registered.program(*arguments.values(), **options)
        if not isinstance(actions, Iterable):
            raise UserError(f"schedule '{registered.name}' gives {actions!r} for rank {rank}, not actions", hint=hint)
        for action in actions:
            if not isinstance(action, Action):
                raise UserError(f"schedule '{registered.name}' yields {action!r} on rank {rank}, which is no Action",
                                hint=hint)
            yield action
    except VpipeError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"schedule '{registered.name}' fails on rank {rank} of {size.ranks} with "
                        f"{counted(size.microbatches, 'microbatch')}: {type(error).__name__}: {error}",
                        hint="mend its generator, or refuse such sizes with requires",
                        where=f"{place.filename}:{place.lineno}") from error


def _searched(registered: RegisteredSchedule, placement: Placement, views: Sequence[ReplicaView], microbatches: int,
              recompute: Collection[int], costs: Costs | None, limits: Limits) -> Schedule:
    """Search an order for one replica of every stage, and give it to all replicas."""
    assert registered.search is not None
    groups = sorted(set(placement))  # so that an unreplicated rank keeps the number that costs and limits know
    alone = tuple((groups.index(ranks),) for ranks in placement)
    orders = {own: registered.search(alone, own, costs, limits) for own in {view.size.microbatches for view in views}}
    position = {rank: index for index, group in enumerate(groups) for rank in group}
    programs, peaks = [], []
    for rank, view in enumerate(views):
        order = orders[view.size.microbatches]
        programs.append(tuple(with_recompute(view.translated(order.programs[position[rank]]), recompute)))
        peaks.append(order.peak_activations[position[rank]])
    first = orders[views[placement[0][0]].size.microbatches]
    return replace(first, placement=placement, programs=tuple(programs), microbatches=microbatches,
                   update_every=microbatches, peak_activations=tuple(peaks))


def with_recompute(program: Iterable[Action], stages: Collection[int]) -> Iterator[Action]:
    """Yield the program with early recomputation: an R right before every backward (B or I) of ``stages``.

    A backward waits for its gradient where a rank has to wait. An R before it needs no gradient and fills that time.
    Any earlier place would hold the activations of one more microbatch. Backwards that have an R keep it.
    """
    if not stages:
        yield from program
        return
    recomputed: set[tuple[int, int]] = set()
    for action in program:
        key = action.stage, action.index
        if action.op is Op.RECOMPUTE:
            recomputed.add(key)
        elif action.op.returns and action.stage in stages and key not in recomputed:
            yield Action(Op.RECOMPUTE, *key)
        yield action


def without_backwards(program: Iterable[Action], frozen: int) -> Iterator[Action]:
    """Yield a program in which the first ``frozen`` stages, which train nothing, take microbatches forward only."""
    return (action for action in program
            if action.stage >= frozen or not action.op.per_microbatch or action.op.uses_version)


def freeze(schedule: Schedule, frozen: int) -> Schedule:
    """Return a schedule that is not lowered yet for a pipeline whose first ``frozen`` stages train nothing."""
    return replace(schedule, frozen=frozen, programs=tuple(tuple(without_backwards(program, frozen))
                                                           for program in schedule.programs))


def reverse_backwards(schedule: Schedule) -> Schedule:
    """Return a schedule that is not lowered yet with the backwards of every rank from the last microbatch to the first.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 1  .  F0 F1 F2 F3 .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 2  .  .  F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 -S

    Executors whose forwards run in threads have this order. It has GPipe's bubble and peak. The tensors of the last
    forward are still in the caches, and autograd frees its memory in the reverse of the order in which it took it.

    Raises:
        UserError: a rank has a forward after a backward, or backwards in halves.
    """
    programs = []
    for program in schedule.programs:
        backwards = [action for action in program if action.op is Op.BACKWARD or action.op is Op.RECOMPUTE]
        first = program.index(backwards[0]) if backwards else len(program)
        steps = program[first + len(backwards):]
        if any(action.op.counts != UPDATE for action in steps):
            raise UserError(f"'{schedule.name}' cannot run its backwards from the last microbatch to the first",
                            hint="they must follow all forwards of a rank, as in "
                                 f"{' or '.join(RegisteredSchedule.with_reversible_backwards())}")
        # The sort is stable: a recomputation stays right before its backward.
        backwards.sort(key=lambda action: -action.index)
        programs.append([*program[:first], *backwards, *steps])
    return schedule.with_programs(programs)
