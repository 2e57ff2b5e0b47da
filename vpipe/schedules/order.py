"""A schedule: where the stages live and what every rank does, in order."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vpipe.errors import UserError, VpipeError, counted
from vpipe.schedules.action import Action
from vpipe.schedules.recompute import with_recompute
from vpipe.schedules.registry import Limits, Recipe, recipe_named, schedule_names
from vpipe.schedules.simulation.costs import Costs
from vpipe.schedules.size import Placement, Size


@dataclass(frozen=True)
class Schedule:
    """One list of actions per rank, and what it promises.

    Attributes:
        name: the recipe's name, or the file's.
        placement: ranks per stage.
        programs: actions per rank.
        microbatches: how many flow through.
        update_every: microbatches per optimizer step.
        flush: whether the pipeline is empty at every step.
        peak_activations: per rank, microbatch-stages whose activations it may hold at once.
        versions: per stage, weight versions it may hold at once.
        ties: stages that borrow a stage's tied weights, by owning stage.
        recipe: what continues a schedule without a flush beyond its programs; None when these are all there is.
    """

    name: str
    placement: Placement
    programs: tuple[tuple[Action, ...], ...]
    microbatches: int
    update_every: int
    flush: bool
    peak_activations: tuple[int, ...]
    versions: tuple[int, ...]
    ties: Mapping[int, tuple[int, ...]]
    recipe: Recipe | None = None

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(self.programs)

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> Schedule:
        """The same schedule with other programs: what a pass returns."""
        return replace(self, programs=tuple(tuple(program) for program in programs))


def stages_of_rank(placement: Placement, rank: int) -> list[int]:
    """The stages that live on ``rank``, in order."""
    return [stage for stage, ranks in enumerate(placement) if rank in ranks]


def describe_rank(placement: Placement, rank: int) -> str:
    """A rank with its stages, for messages: ``rank 2 (stage 2)``."""
    stages = stages_of_rank(placement, rank)
    return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"


def check_chunks(recipe: Recipe, chunks: int | None, key: str = "chunks") -> None:
    """Refuse a number of stages per rank that ``recipe`` cannot have; ``key`` is what the user calls it."""
    if chunks is None or (chunks >= 1 if recipe.any_chunks else chunks == recipe.chunks):
        return
    if recipe.any_chunks:
        raise UserError(f"{key} is {chunks}", hint="give a whole number, 1 or more")
    others = [other for other in schedule_names() if recipe_named(other).any_chunks]
    raise UserError(f"{key} is {chunks}, but '{recipe.name}' holds {counted(recipe.chunks, 'stage')} on each "
                    "rank", hint=f"leave {key} out" + (f", or choose a schedule with any number: "
                                                            f"{', '.join(others)}" if others else ""))


def size_of(recipe: Recipe, placement: Placement, microbatches: int, update_every: int | None) -> Size:
    """The numbers of a schedule over ``placement``, which may name the ranks in any order.

    Raises:
        UserError: the recipe does not hold its stages so, or cannot have these numbers.
    """
    if not placement or microbatches < 1:
        raise UserError(f"{counted(len(placement), 'stage')} and {counted(microbatches, 'microbatch')}",
                        hint="a pipeline needs at least one of each")
    ranks = len({rank for ranks in placement for rank in ranks})
    chunks, left = divmod(len(placement), ranks)
    if left or not (chunks == recipe.chunks or recipe.any_chunks):
        raise UserError(f"'{recipe.name}' holds {'equally many' if recipe.any_chunks else recipe.chunks} stage"
                        f"{'s' * (recipe.any_chunks or recipe.chunks > 1)} on each rank, but "
                        f"{counted(len(placement), 'stage')} on {counted(ranks, 'rank')} are asked for",
                        hint=f"use {ranks * (max(1, chunks) if recipe.any_chunks else recipe.chunks)} stages, or "
                             "another number of ranks")
    names = [placement[position] for position in range(ranks)]
    for stage, held_by in enumerate(placement):
        expected = names[recipe.layout.rank_of(stage, ranks)]
        if held_by != expected and recipe.search is None:
            raise UserError(f"'{recipe.name}' holds stage {stage} where stage {placement.index(expected)} is, on "
                            f"rank {', '.join(map(str, expected))}, but it is placed on rank "
                            f"{', '.join(map(str, held_by))}", hint="place the stages as "
                            f"{[list(names[recipe.layout.rank_of(s, ranks)]) for s in range(len(placement))]}")
    size = Size(ranks, microbatches, chunks, _update_every(recipe, ranks, microbatches, update_every))
    if (problem := recipe.requires(size)) is not None:
        raise UserError.all_of([problem])
    return size


def _update_every(recipe: Recipe, ranks: int, microbatches: int, update_every: int | None) -> int:
    """Microbatches per update; the fewest that the recipe can have, when not told."""
    if recipe.flush:
        if update_every not in (None, 1, microbatches):
            raise UserError(f"update_every is {update_every}, but '{recipe.name}' updates once per batch of "
                            f"{counted(microbatches, 'microbatch')}",
                            hint="leave update_every out, or choose a schedule without a flush, such as pipedream")
        return microbatches
    least = recipe.update_every(ranks)
    fitting = [n for n in range(1, microbatches + 1) if microbatches % n == 0 and n >= least]
    if not fitting:
        raise UserError(f"'{recipe.name}' on {counted(ranks, 'rank')} updates every {least} microbatches or more, "
                        f"but there are only {microbatches}", hint=f"use {least} microbatches or more, or fewer ranks")
    every = fitting[0] if update_every is None else update_every
    if every not in fitting:
        why = (f"is less than the {least} that '{recipe.name}' needs on {counted(ranks, 'rank')}" if 0 < every < least
               else f"does not divide {counted(microbatches, 'microbatch')}")
        raise UserError(f"update_every is {every}, which {why}", hint=f"choose one of {fitting}")
    return every


def compute_program(recipe: Recipe, placement: Placement, rank: int, size: Size,
                    recompute: Collection[int] = ()) -> Iterator[Action]:
    """The compute actions and steps of one rank, lazily; the stages in ``recompute`` do so early."""
    position = next(stage for stage, ranks in enumerate(placement) if rank in ranks)
    return with_recompute(_generated(recipe, position, size), recompute)


def _generated(recipe: Recipe, rank: int, size: Size) -> Iterator[Action]:
    """What the generator of ``recipe`` yields, as long as these are actions.

    Raises:
        UserError: it takes other arguments, fails, or yields something else.
    """
    arguments = {"rank": rank, "ranks": size.ranks, "microbatches": size.microbatches}
    options = ({"chunks": size.chunks} if recipe.any_chunks else {}) | (
        {} if recipe.flush else {"update_every": size.update_every})
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


def build(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None, recompute: Collection[int] = (),
          costs: Costs | None = None, limits: Limits = None) -> Schedule:
    """The schedule ``name`` over ``placement``, compute actions and steps only.

    Args:
        microbatches: per optimizer step with a flush; of the whole stream without.
        update_every: microbatches per optimizer step without a flush; as few as can be when not given.
        ties: see :class:`Schedule`.
        recompute: stages that recompute activations.
        costs: what a searched schedule is made for; equal ones when not given.
        limits: what each rank of a searched schedule may hold.

    Raises:
        UserError: the numbers do not fit the schedule.
    """
    recipe = recipe_named(name)
    size = size_of(recipe, placement, microbatches, update_every)
    if recipe.search is not None:
        found = recipe.search(placement, microbatches, costs, limits)
        early = found.with_programs([list(with_recompute(iter(program), recompute)) for program in found.programs])
        return replace(early, name=name, ties=dict(ties or {}))
    if limits is not None:
        raise UserError(f"'{name}' has one order, whatever the memory limit of {limits}",
                        hint="leave the limit out, or choose a schedule that keeps one, such as auto")
    position = {rank: stage for stage, ranks in reversed(list(enumerate(placement))) for rank in ranks}
    return Schedule(
        name, placement,
        tuple(tuple(compute_program(recipe, placement, rank, size, recompute)) for rank in range(size.ranks)),
        microbatches, size.update_every, recipe.flush,
        tuple(recipe.peak_activations(position[rank], size) for rank in range(size.ranks)),
        tuple(recipe.versions(position[ranks[0]], size) for ranks in placement), dict(ties or {}),
        None if recipe.flush else recipe)
