"""A schedule: where the stages live and what every rank does, in order."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vpipe.errors import UserError, VpipeError, counted
from vpipe.schedules.action import Action
from vpipe.schedules.recompute import with_recompute
from vpipe.schedules.registry import Limits, Recipe, recipe_named, recipes
from vpipe.schedules.rounds import Rounds
from vpipe.schedules.seat import Seat, as_stream, seats
from vpipe.schedules.simulation.costs import Costs
from vpipe.schedules.size import Placement


@dataclass(frozen=True)
class Schedule:
    """One list of actions per rank, and what it promises.

    Attributes:
        name: the recipe's name, or the file's.
        placement: ranks per stage; with several, microbatch i goes to the (i mod width)-th.
        programs: actions per rank.
        microbatches: how many flow through.
        update_every: microbatches per optimizer step; without a flush, on every replica.
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

    @cached_property
    def rounds(self) -> Rounds:
        """Which of the microbatches a replica takes, and which an update."""
        return Rounds(self.placement, self.update_every, self.flush, lambda number: 0 <= number < self.microbatches)

    def updates(self, stage: int) -> int:
        """How many updates a stage makes; the last may have fewer microbatches."""
        return -(-self.microbatches // self.rounds.span(stage))

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
    others = [other.name for other in recipes() if other.any_chunks]
    raise UserError(f"{key} is {chunks}, but '{recipe.name}' holds {counted(recipe.chunks, 'stage')} on each "
                    "rank", hint=f"leave {key} out" + (f", or choose a schedule with any number: "
                                                            f"{', '.join(others)}" if others else ""))


def stream_program(recipe: Recipe, seat: Seat, rounds: Rounds, stages: list[int],
                   recompute: Collection[int] = ()) -> Iterator[Action]:
    """The compute actions and steps of one rank of a schedule without a flush, lazily, over the microbatches there are.

    Args:
        stages: of the rank.
        recompute: stages that recompute activations, early.
    """
    endless = seat.translated(_generated(recipe, seat.endless()))
    return as_stream(with_recompute(endless, recompute), seat, rounds, stages)


def _generated(recipe: Recipe, seat: Seat) -> Iterator[Action]:
    """What the generator of ``recipe`` yields in a seat, as long as these are actions.

    Raises:
        UserError: it takes other arguments, fails, or yields something else.
    """
    rank, size = seat.rank, seat.size
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
        update_every: microbatches per optimizer step, and replica, without a flush; as few as can be when not given.
        ties: see :class:`Schedule`.
        recompute: stages that recompute activations.
        costs: what a searched schedule is made for; equal ones when not given.
        limits: what each rank of a searched schedule may hold.

    Raises:
        UserError: the numbers do not fit the schedule.
    """
    recipe = recipe_named(name)
    found = seats(recipe, placement, microbatches, update_every)
    every = microbatches if recipe.flush else found[0].size.update_every
    if recipe.search is not None:
        return replace(_searched(recipe, placement, found, microbatches, recompute, costs, limits), name=name,
                       ties=dict(ties or {}))
    if limits is not None:
        raise UserError(f"'{name}' has one order, whatever the memory limit of {limits}",
                        hint="leave the limit out, or choose a schedule that keeps one, such as auto")
    rounds = Rounds(placement, every, recipe.flush, lambda microbatch: microbatch < microbatches)
    programs = []
    for rank, seat in enumerate(found):
        if recipe.flush:
            programs.append(tuple(with_recompute(seat.translated(_generated(recipe, seat)), recompute)))
        else:
            stages = stages_of_rank(placement, rank)
            programs.append(tuple(stream_program(recipe, seat, rounds, stages, recompute)))
    return Schedule(
        name, placement, tuple(programs), microbatches, every, recipe.flush,
        tuple(recipe.peak_activations(seat.rank, seat.size) for seat in found),
        tuple(max(recipe.versions(found[rank].rank, found[rank].size) for rank in ranks) for ranks in placement),
        dict(ties or {}), None if recipe.flush else recipe)


def _searched(recipe: Recipe, placement: Placement, found: Sequence[Seat], microbatches: int,
              recompute: Collection[int], costs: Costs | None, limits: Limits) -> Schedule:
    """The orders that a search finds for one replica of every stage, on all of them."""
    assert recipe.search is not None
    crews = sorted(set(placement))  # so that a rank alone keeps its number, by which costs and limits know it
    alone = tuple((crews.index(ranks),) for ranks in placement)
    orders = {own: recipe.search(alone, own, costs, limits) for own in {seat.size.microbatches for seat in found}}
    position = {rank: index for index, crew in enumerate(crews) for rank in crew}
    programs, peaks = [], []
    for rank, seat in enumerate(found):
        order = orders[seat.size.microbatches]
        programs.append(tuple(with_recompute(seat.translated(order.programs[position[rank]]), recompute)))
        peaks.append(order.peak_activations[position[rank]])
    first = orders[found[placement[0][0]].size.microbatches]
    return replace(first, placement=placement, programs=tuple(programs), microbatches=microbatches,
                   update_every=microbatches, peak_activations=tuple(peaks))
