"""A schedule: where the stages live and what every rank does, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vpipe.errors import UserError
from vpipe.schedules.action import Action
from vpipe.schedules.registry import Recipe, recipe_named

Placement = tuple[tuple[int, ...], ...]
"""The ranks of every stage: ``((0,), (1,))`` is stage 0 on rank 0 and stage 1 on rank 1."""


@dataclass(frozen=True)
class Schedule:
    """One list of actions per rank, and what it promises.

    Attributes:
        name: the recipe's name.
        placement: ranks per stage.
        programs: actions per rank.
        microbatches: how many flow through.
        update_every: microbatches per optimizer step.
        flush: whether the pipeline is empty at every step.
        peak_activations: per stage, microbatches whose activations it may hold at once.
        versions: per stage, weight versions it may hold at once.
        ties: ranks that borrow a stage's tied weights, by owning stage.
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

    @property
    def stages(self) -> int:
        return len(self.placement)

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> Schedule:
        """The same schedule with other programs: what a pass returns."""
        return replace(self, programs=tuple(tuple(program) for program in programs))


def default_placement(stages: int) -> Placement:
    """Stage s on rank s."""
    return tuple((stage,) for stage in range(stages))


def stage_of_rank(placement: Placement, rank: int) -> int:
    """The stage that lives on ``rank`` (one stage per rank)."""
    return next(stage for stage, ranks in enumerate(placement) if rank in ranks)


def compute_program(recipe: Recipe, placement: Placement, rank: int, microbatches: int,
                    update_every: int) -> Iterator[Action]:
    """The compute actions and steps of one rank, lazily."""
    stage = stage_of_rank(placement, rank)
    if recipe.flush:
        return recipe.program(stage, len(placement), microbatches)
    return recipe.program(stage, len(placement), microbatches, update_every)


def build(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None) -> Schedule:
    """The schedule ``name`` over ``placement``, compute actions and steps only.

    Args:
        microbatches: per optimizer step with a flush; of the whole stream without.
        update_every: microbatches per optimizer step without a flush; 1 when not given.
        ties: see :class:`Schedule`.

    Raises:
        UserError: the numbers do not fit the schedule.
    """
    recipe = recipe_named(name)
    update_every = check_numbers(recipe, len(placement), microbatches, update_every)
    count = range(len(placement))
    return Schedule(
        name, placement,
        tuple(tuple(compute_program(recipe, placement, rank, microbatches, update_every)) for rank in count),
        microbatches, update_every, recipe.flush,
        tuple(recipe.peak_activations(stage, len(placement), microbatches) for stage in count),
        tuple(recipe.versions(stage, len(placement), microbatches) for stage in count),
        dict(ties or {}))


def check_numbers(recipe: Recipe, stages: int, microbatches: int, update_every: int | None) -> int:
    """Microbatches per update, after refusing numbers that no schedule can have."""
    if stages < 1 or microbatches < 1:
        raise UserError(f"{stages} stages and {microbatches} microbatches",
                        hint="a pipeline needs at least one of each")
    if recipe.flush:
        if update_every not in (None, 1, microbatches):
            raise UserError(f"update_every is {update_every}, but '{recipe.name}' updates once per batch of "
                            f"{microbatches} microbatches",
                            hint="leave update_every out, or choose a schedule without a flush, such as pipedream")
        return microbatches
    every = 1 if update_every is None else update_every
    if every < 1 or microbatches % every:
        raise UserError(f"update_every is {every}, which does not divide {microbatches} microbatches",
                        hint=f"choose one of {[n for n in range(1, microbatches + 1) if microbatches % n == 0]}")
    return every
