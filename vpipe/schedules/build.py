"""Build a schedule from its registered name: call the generator for every rank and translate its actions."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vpipe.errors import Problem, UserError, VpipeError, counted
from vpipe.schedules.action import Action, Op, forward
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.costs import Costs
from vpipe.schedules.kinds import UPDATE
from vpipe.schedules.registry import (
    DEFAULT_ASYNCHRONOUS,
    DEFAULT_SCHEDULE,
    Limits,
    Recipe,
    recipe_named,
    recipes,
    reversible_schedules,
)
from vpipe.schedules.schedule import Schedule, stages_of_rank
from vpipe.schedules.size import MOST_MICROBATCHES, Placement, Size, default_warmup

SHALLOWER = "a lower warmup_depth"
"""What a message advises where more microbatches are in flight than 1F1B has."""


def build(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None, recompute: Collection[int] = (),
          costs: Costs | None = None, limits: Limits = None, warmup: Sequence[int] | None = None) -> Schedule:
    """Return the schedule ``name`` over ``placement`` with compute actions and steps only.

    Args:
        microbatches: per optimizer step with a flush; of the whole stream without.
        update_every: microbatches per optimizer step, and replica, without a flush; the fewest possible when None.
        ties: see :class:`~vpipe.schedules.schedule.Schedule`.
        recompute: stages that recompute activations.
        costs: the costs that a searched schedule is made for; equal ones when None.
        limits: the activations that each rank of a searched schedule may hold.
        warmup: forwards of a replica of every stage before its first backward; those of 1F1B when None.

    Raises:
        UserError: the numbers do not fit the schedule.
    """
    recipe = recipe_named(name)
    views = replica_views(recipe, placement, microbatches, update_every, warmup)
    if recipe.search is not None:
        searched = _searched(recipe, placement, views, microbatches, recompute, costs, limits)
        return replace(searched, name=name, ties=dict(ties or {}))
    if limits is not None:
        raise UserError(f"'{name}' has one order, whatever the memory limit of {limits}",
                        hint="leave the limit out, or choose a schedule that keeps one, such as auto")
    every = microbatches if recipe.flush else views[0].size.update_every
    assignment = Assignment(placement, every, recipe.flush, lambda microbatch: microbatch < microbatches)
    programs = [tuple(rank_program(recipe, view, assignment, stages_of_rank(placement, rank), recompute))
                for rank, view in enumerate(views)]
    return Schedule(
        name, placement, tuple(programs), microbatches, every, recipe.flush,
        tuple(recipe.peak_activations(view.rank, view.size) for view in views),
        tuple(max(recipe.versions(views[rank].rank, views[rank].size) for rank in ranks) for ranks in placement),
        dict(ties or {}), not recipe.flush,
        () if recipe.flush else tuple(views[ranks[0]].warmup for ranks in placement))


def build_evaluation(placement: Placement, microbatches: int) -> Schedule:
    """Return the forwards of an evaluation: stage s takes microbatch t - s at tick t.

    Every input of a stage was made one tick before, on whichever rank, so all stages have work at once. Of one tick the
    later stages come first on every rank alike, so that transfers are sent and received in one order.
    """
    def forwards(rank: int) -> Iterator[Action]:
        stages = stages_of_rank(placement, rank)
        for tick in range(microbatches + stages[-1]):
            for stage in reversed(stages):
                replicas = placement[stage]
                if (0 <= tick - stage < microbatches
                        and replicas[Assignment.replica_of(tick - stage, len(replicas))] == rank):
                    yield forward(stage, tick - stage)

    ranks = len({rank for ranks in placement for rank in ranks})
    peak = microbatches * len(placement)
    return Schedule("evaluation", placement, tuple(tuple(forwards(rank)) for rank in range(ranks)), microbatches,
                    microbatches, True, (peak,) * ranks, (1,) * len(placement), {})


@dataclass(frozen=True)
class ReplicaView:
    """Map a rank of a replicated stage to the unreplicated pipeline that its generator is called for.

    A generator knows pipelines with one rank per position. A replica of a stage with w replicas has every w-th
    microbatch. Before its first backward it must take enough of them to keep all later ranks at work: of R ranks in its
    own and later stages these are (R-1) // w. So the generator is called for a pipeline in which that many positions
    are behind the replica. With equally many replicas everywhere, that is its own position among the stages.

    Source of the depths: PipeDream (SOSP 2019), section 3.2.

    Attributes:
        rank: the position that the generator is called for.
        size: of the pipeline that the generator is called for, with the replica's own microbatches.
        stages: the real number of each of the generator's stages that lives on this rank.
        replica, width: the number of this replica, and how many there are.
        home: the real number of this rank.
    """

    rank: int
    size: Size
    stages: dict[int, int]
    replica: int
    width: int
    home: int

    @property
    def warmup(self) -> int:
        """Return the forwards of this replica before its first backward."""
        return self.size.warmup_of(self.rank)

    def microbatch_of(self, turn: int) -> int:
        """Return the microbatch that this replica takes in a turn."""
        return Assignment.microbatch_of(turn, self.replica, self.width)

    def endless(self) -> ReplicaView:
        """Return the same view of a stream whose length nobody knows."""
        return replace(self, size=replace(self.size, microbatches=sys.maxsize))

    def translated(self, program: Iterable[Action]) -> Iterator[Action]:
        """Return a generator's actions with the real numbers of stages and microbatches."""
        if self.width == 1 and all(real == own for own, real in self.stages.items()):
            return iter(program)
        return (Action(action.op, self.stages.get(action.stage, action.stage),
                       self.microbatch_of(action.microbatch) if action.op.per_microbatch
                       else action.microbatch) for action in program)


def rank_program(recipe: Recipe, view: ReplicaView, assignment: Assignment, stages: list[int],
                 recompute: Collection[int] = ()) -> Iterator[Action]:
    """Yield lazily the compute actions and steps of one rank of a schedule of fixed order."""
    if not recipe.flush:
        return stream_program(recipe, view, assignment, stages, recompute)
    return with_recompute(view.translated(_generated(recipe, view)), recompute)


def stream_program(recipe: Recipe, view: ReplicaView, assignment: Assignment, stages: list[int],
                   recompute: Collection[int] = ()) -> Iterator[Action]:
    """Yield lazily the compute actions and steps of one rank of a schedule without a flush.

    The generator is called for an endless stream. Its program is prefix-closed
    (:data:`vpipe.schedules.registry.Program`), so leaving out actions at its end changes nothing before them.

    Args:
        stages: of the rank.
        recompute: stages that recompute activations.
    """
    completed, stepped = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    latest = -1  # that is known to exist
    for action in with_recompute(view.translated(_generated(recipe, view.endless())), recompute):
        needed = _needed(action, assignment)
        if needed <= latest or assignment.exists(needed):
            latest = max(latest, needed)
            yield action
            if action.op.makes_version:
                stepped[action.stage] += 1
            elif action.op.completes:
                completed[action.stage] += 1
        elif not any(assignment.exists(assignment.of_rank_at(completed[stage], stage, view.home))
                     or assignment.has_update(stage, stepped[stage]) for stage in stages):
            return


def _needed(action: Action, assignment: Assignment) -> int:
    """Return a microbatch without which there is no such action; -1 if there always is."""
    if action.op.counts == UPDATE:
        return action.microbatch * assignment.per_update(action.stage)
    if action.op.chooses:
        return (action.microbatch - 1) * assignment.per_update(action.stage) if action.microbatch else -1
    return action.microbatch


def replica_views(recipe: Recipe, placement: Placement, microbatches: int,
                  update_every: int | None, warmup: Sequence[int] | None = None) -> tuple[ReplicaView, ...]:
    """Return the view of every rank of a schedule over ``placement``, which may name the ranks in any order.

    ``warmup`` are the forwards of every stage before its first backward; those of 1F1B when None.

    Raises:
        UserError: the schedule cannot have this placement or these numbers.
    """
    if not placement or microbatches < 1:
        raise UserError(f"{counted(len(placement), 'stage')} and {counted(microbatches, 'microbatch')}",
                        hint="a pipeline needs at least one of each")
    chunks, groups, own_ranks = _groups(recipe, placement)
    widths = [len(group) for group in groups]
    most = max(map(len, placement))
    if recipe.flush and microbatches < most:
        stage = list(map(len, placement)).index(most)
        raise UserError(f"{counted(most, 'replica')} of stage {stage} for "
                        f"{counted(microbatches, 'microbatch')}: some would have nothing to do",
                        hint=f"use {most} microbatches or more, or fewer replicas")
    # The replicas of the first stage may have the fewest ranks behind them: 2-1-1 is as deep as its second stage.
    behind = default_warmup(widths)
    depth = max(behind) + 1
    if warmup is not None:
        check_warmup(recipe, widths, warmup)
    ahead = behind if warmup is None else tuple(warmup)
    every = _update_every(recipe, max(ahead) + 1, microbatches, update_every, ahead == behind)
    views: dict[int, ReplicaView] = {}
    even = len(set(widths)) == 1
    by_rank = dict(zip(own_ranks, ahead, strict=True))
    own_ahead = tuple(by_rank[rank] for rank in range(depth)) if even else ()
    for position, group in enumerate(groups):
        own_rank = own_ranks[position] if even else depth - 1 - behind[position]
        stages = {} if even else {own_rank: position}
        if not even:  # a generator's pipeline has other stages only where all have equally many replicas
            own_ahead = tuple(ahead[position] if number == own_rank else depth - 1 - number for number in range(depth))
        for replica, rank in enumerate(group):
            own = Assignment.turns_of(microbatches, replica, len(group))
            size = Size(depth, own, chunks, own if recipe.flush else every, even, own_ahead)
            if (problem := recipe.requires(size)) is not None:
                raise UserError.all_of([problem if len(group) == 1 or not size.even else Problem(
                    f"a replica of the pipeline takes {own} of {counted(microbatches, 'microbatch')}: {problem.what}",
                    f"for each of the {len(group)} replicas, {problem.hint}")])
            views[rank] = ReplicaView(own_rank, size, stages, replica, len(group), rank)
    return tuple(views[rank] for rank in sorted(views))


def check_warmup(recipe: Recipe, widths: Sequence[int], warmup: Sequence[int] | str) -> None:
    """Refuse forwards before the first backward that a recipe over stages with ``widths`` replicas cannot have.

    The microbatches that a stage has in flight beyond those of 1F1B must not become more from stage to stage: a stage
    can take no more of them than the one before lets in. A text, such as auto, stands for any.
    """
    given, least = warmup if isinstance(warmup, str) else list(warmup), default_warmup(widths)
    if not isinstance(given, str) and len(given) != len(least):
        raise UserError(f"warmup_depth has {counted(len(given), 'number')} for {counted(len(least), 'stage')}",
                        hint="give the forwards of every stage before its first backward, or leave it out")
    if given == list(least):
        return
    if not isinstance(given, str) and max(given) > MOST_MICROBATCHES:
        raise UserError(f"warmup_depth is {given}", hint=f"give {MOST_MICROBATCHES:,} at most")
    if not recipe.any_warmup:
        others = ", ".join(other.name for other in recipes() if other.any_warmup)
        why = "has a flush" if recipe.flush else "has an order of its own"
        raise UserError(f"warmup_depth is {given}, but '{recipe.name}' {why}",
                        hint=f"leave warmup_depth out, or choose one of: {others}")
    if isinstance(given, str):
        return
    fitting, more = list(least), 0  # of the stage behind, in microbatches
    for stage in reversed(range(len(least) - 1)):
        fitting[stage] += -(-max(more, (given[stage] - least[stage]) * widths[stage]) // widths[stage])
        more = (fitting[stage] - least[stage]) * widths[stage]
    for stage, (depth, low) in enumerate(zip(given, least, strict=True)):
        if depth == fitting[stage]:
            continue
        what = f"stage {stage} does {depth} before its first backward"
        if depth < low:
            what += f", but needs {low}"
        elif stage == len(least) - 1:
            what += ", but the last stage has nothing to wait for"
        else:
            what += f", {depth - low} more than it needs, but a stage behind it does more in addition"
        raise UserError(f"warmup_depth is {given}: {what}", hint=f"use {fitting}, the nearest depths that fit")


def check_no_warmup(file: str, warmup: Sequence[int] | None) -> None:
    """Refuse forwards before the first backward for a schedule that is read from a file."""
    if warmup is not None:
        raise UserError(f"warmup_depth is {list(warmup)}, but '{file}' says the order of its actions",
                        hint="leave warmup_depth out, or take a schedule by its name")


def check_chunks(recipe: Recipe, chunks: int | None, key: str = "chunks") -> None:
    """Refuse a number of stages per rank that ``recipe`` cannot have; ``key`` is what the user calls it."""
    if chunks is None or (chunks >= 1 if recipe.any_chunks else chunks == recipe.chunks):
        return
    if recipe.any_chunks:
        raise UserError(f"{key} is {chunks}", hint="give a whole number, 1 or more")
    others = ", ".join(other.name for other in recipes() if other.any_chunks)
    raise UserError(f"{key} is {chunks}, but '{recipe.name}' holds {counted(recipe.chunks, 'stage')} on each rank",
                    hint=f"leave {key} out" + (f", or choose a schedule with any number: {others}" if others else ""))


def _groups(recipe: Recipe, placement: Placement) -> tuple[int, list[tuple[int, ...]], list[int]]:
    """Return the stages per rank that a microbatch passes, the groups of replicas, and the generator's rank of each.

    The groups stand in the order in which microbatches first come to them; with copies of stages, by their ranks.

    Raises:
        UserError: the recipe cannot have this placement.
    """
    for group in placement:
        if twice := [rank for rank, times in Counter(group).items() if times > 1]:
            raise UserError(f"rank {twice[0]} stands twice among the ranks {list(group)} of a stage",
                            hint="name each rank once")
    if not places_copies(recipe, len(placement)):
        return _alone(recipe, placement)
    for chunks in range(1, len(placement) + 1) if recipe.any_chunks else (recipe.chunks,):
        ranks, left = divmod(len(placement), chunks)
        if not left and (groups := _matched(placement, placement_of(recipe, ranks, chunks))) is not None:
            return chunks, [groups[rank] for rank in sorted(groups)], sorted(groups)
    ranks, left = divmod(len(placement), recipe.chunks)
    shown = placement_of(recipe, ranks + (left > 0), recipe.chunks)
    raise UserError(f"'{recipe.name}' does not place stages as {list(map(list, placement))}",
                    hint=f"place them as {list(map(list, shown))}, or with equally many replicas for every rank")


def places_copies(recipe: Recipe, stages: int) -> bool:
    """Tell whether a recipe places several copies of a stage, even without replicas."""
    return any(len(ranks) > 1 for ranks in placement_of(recipe, max(1, stages // recipe.chunks), recipe.chunks))


def placement_of(recipe: Recipe, ranks: int, chunks: int) -> Placement:
    """Return the ranks of every stage under a recipe, whose layout may be a user's.

    Raises:
        UserError: it is no placement of so many stages.
    """
    placement = tuple(map(tuple, recipe.layout(ranks, chunks)))
    if len(placement) != ranks * chunks or {rank for group in placement for rank in group} != set(range(ranks)):
        raise UserError(f"the layout of '{recipe.name}' places {counted(ranks * chunks, 'stage')} on "
                        f"{counted(ranks, 'rank')} as {list(map(list, placement))}",
                        hint="let it return the ranks of every stage, numbered from 0, and leave out no rank")
    return placement


def _matched(placement: Placement, own: Placement) -> dict[int, tuple[int, ...]] | None:
    """Return the ranks that stand for each rank of ``own`` in a placement that is ``own`` with replicas.

    None where it is not, or where they are not equally many everywhere.
    """
    width, left = divmod(len(placement[0]), len(own[0]))
    found: dict[int, tuple[int, ...]] = {}
    for group, ranks in zip(placement, own, strict=True):
        if left or len(group) != width * len(ranks):
            return None
        for number, rank in enumerate(ranks):
            part = group[number * width:(number + 1) * width]
            if found.setdefault(rank, part) != part:
                return None
    everyone = [rank for part in found.values() for rank in part]
    return found if len(everyone) == len(set(everyone)) else None


def _alone(recipe: Recipe, placement: Placement) -> tuple[int, list[tuple[int, ...]], list[int]]:
    """Return the same for a recipe that places every stage on one rank."""
    groups = list(dict.fromkeys(placement))
    times = Counter(rank for group in groups for rank in group)
    if twice := [rank for rank, count in times.items() if count > 1]:
        group, other = [group for group in groups if twice[0] in group][:2]
        raise UserError(f"rank {twice[0]} is among the ranks {list(group)} of one stage and {list(other)} of another",
                        hint=f"under '{recipe.name}' stages either have all their ranks in common, in the same order, "
                             "or none")
    ranks = len(groups)
    chunks, left = divmod(len(placement), ranks)
    if left or not (chunks == recipe.chunks or recipe.any_chunks):
        word = "rank" if len(times) == ranks else "group of replicas"
        raise UserError(f"'{recipe.name}' holds {'equally many' if recipe.any_chunks else recipe.chunks} stage"
                        f"{'s' * (recipe.any_chunks or recipe.chunks > 1)} on each {word}, but "
                        f"{counted(len(placement), 'stage')} on {counted(ranks, word)} are asked for",
                        hint=f"use {ranks * (max(1, chunks) if recipe.any_chunks else recipe.chunks)} stages, or "
                             f"another number of {'ranks' if word == 'rank' else 'groups'}")
    placed = [rank for (rank,) in placement_of(recipe, ranks, chunks)]
    own_ranks = list(range(ranks)) if recipe.search is not None else list(dict.fromkeys(placed))
    own = [groups[own_ranks.index(rank)] for rank in placed]
    for stage, (group, expected) in enumerate(zip(placement, own, strict=True)):
        if group != expected and recipe.search is None:
            raise UserError(f"'{recipe.name}' holds stage {stage} where stage {placement.index(expected)} is, on "
                            f"rank {', '.join(map(str, expected))}, but it is placed on rank "
                            f"{', '.join(map(str, group))}", hint=f"place the stages as {list(map(list, own))}")
    if len({len(group) for group in groups}) > 1 and (chunks > 1 or own_ranks != list(range(ranks))
                                                      or recipe.search is not None):
        raise UserError(f"'{recipe.name}' has equally many replicas of every stage, not "
                        f"{', '.join(str(len(ranks)) for ranks in placement)}", hint="give all stages equally many, "
                        f"or take a schedule with one stage per rank, such as {DEFAULT_SCHEDULE} or "
                        f"{DEFAULT_ASYNCHRONOUS}")
    return chunks, groups, own_ranks


def _update_every(recipe: Recipe, depth: int, microbatches: int, update_every: int | None, default: bool) -> int:
    """Return the microbatches per update, and replica; the fewest that the recipe can have when None.

    Args:
        depth: the most microbatches in flight at a stage: as many as ranks behind one another by ``default``.
    """
    if recipe.flush:
        if update_every not in (None, 1, microbatches):
            raise UserError(f"update_every is {update_every}, but '{recipe.name}' updates once per batch of "
                            f"{counted(microbatches, 'microbatch')}", hint="leave update_every out, or choose a "
                            f"schedule without a flush, such as {DEFAULT_ASYNCHRONOUS}")
        return microbatches
    least = recipe.update_every(depth)
    fitting = [n for n in range(1, microbatches + 1) if microbatches % n == 0 and n >= least]
    where = f"on {counted(depth, 'rank')}" if default else f"with {counted(depth, 'microbatch')} in flight at a stage"
    if not fitting:
        raise UserError(f"'{recipe.name}' {where} updates every {least} microbatches or more, "
                        f"but there are only {microbatches}", hint=f"use {least} microbatches or more, or "
                        + ("fewer ranks" if default else SHALLOWER))
    every = fitting[0] if update_every is None else update_every
    if every not in fitting:
        why = (f"is less than the {least} that '{recipe.name}' needs {where}" if 0 < every < least
               else f"does not divide {counted(microbatches, 'microbatch')}")
        raise UserError(f"update_every is {every}, which {why}", hint=f"choose one of {fitting}")
    return every


def _generated(recipe: Recipe, view: ReplicaView) -> Iterator[Action]:
    """Yield what the generator of ``recipe`` yields for a view.

    Raises:
        UserError: the generator takes other arguments, fails, or yields something that is no action.
    """
    rank, size = view.rank, view.size
    arguments = {"rank": rank, "ranks": size.ranks, "microbatches": size.microbatches}
    options: dict[str, object] = {"chunks": size.chunks} if recipe.any_chunks else {}
    if not recipe.flush:
        options["update_every"] = size.update_every
    if recipe.any_warmup:
        options["warmup"] = size.warmup
    try:
        inspect.signature(recipe.program).bind(*arguments.values(), **options)
    except TypeError as error:
        names = ", ".join((*arguments, *options))
        raise UserError(f"schedule '{recipe.name}' does not take {names}: {error}",
                        hint=f"define its generator with the parameters ({names})") from error
    hint = "yield actions: forward(stage, microbatch), backward(stage, microbatch), step(stage, update), ..."
    try:
        actions = recipe.program(*arguments.values(), **options)
        if not isinstance(actions, Iterable):
            raise UserError(f"schedule '{recipe.name}' gives {actions!r} for rank {rank}, not actions", hint=hint)
        for action in actions:
            if not isinstance(action, Action):
                raise UserError(f"schedule '{recipe.name}' yields {action!r} on rank {rank}, which is no Action",
                                hint=hint)
            yield action
    except VpipeError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"schedule '{recipe.name}' fails on rank {rank} of {size.ranks} with "
                        f"{counted(size.microbatches, 'microbatch')}: {type(error).__name__}: {error}",
                        hint="mend its generator, or refuse such sizes with requires",
                        where=f"{place.filename}:{place.lineno}") from error


def _searched(recipe: Recipe, placement: Placement, views: Sequence[ReplicaView], microbatches: int,
              recompute: Collection[int], costs: Costs | None, limits: Limits) -> Schedule:
    """Search an order for one replica of every stage, and give it to all replicas."""
    assert recipe.search is not None
    groups = sorted(set(placement))  # so that an unreplicated rank keeps the number that costs and limits know
    alone = tuple((groups.index(ranks),) for ranks in placement)
    orders = {own: recipe.search(alone, own, costs, limits) for own in {view.size.microbatches for view in views}}
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
        key = action.stage, action.microbatch
        if action.op is Op.RECOMPUTE:
            recomputed.add(key)
        elif action.op.returns and action.stage in stages and key not in recomputed:
            yield Action(Op.RECOMPUTE, *key)
        yield action


def reverse_backwards(schedule: Schedule) -> Schedule:
    """Return a schedule that is not lowered yet with the backwards of every rank from the last microbatch to the first.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 1  .  F0 F1 F2 F3 .  .  .  B3 -- B2 -- B1 -- B0 -S
        rank 2  .  .  F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 -S

    This is the order of the executor ``async_threaded``. It has GPipe's bubble and peak. The tensors of the last
    forward are still in the caches, and autograd frees its memory in the reverse of the order in which it took it.

    Raises:
        UserError: a rank has a forward behind a backward, or backwards in halves.
    """
    programs = []
    for program in schedule.programs:
        backwards = [action for action in program if action.op is Op.BACKWARD or action.op is Op.RECOMPUTE]
        first = program.index(backwards[0]) if backwards else len(program)
        steps = program[first + len(backwards):]
        if any(action.op.counts != UPDATE for action in steps):
            raise UserError(f"'{schedule.name}' cannot run its backwards from the last microbatch to the first",
                            hint="they must follow all forwards of a rank, as in "
                                 f"{' or '.join(reversible_schedules())}")
        # The sort is stable: a recomputation stays right before its backward.
        backwards.sort(key=lambda action: -action.microbatch)
        programs.append([*program[:first], *backwards, *steps])
    return schedule.with_programs(programs)
