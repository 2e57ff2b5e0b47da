"""The seat of a rank: whom it plays in the pipeline that a schedule's generator knows, one rank per position."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vpipe.errors import Problem, UserError, counted
from vpipe.schedules.action import COMPLETES, PER_MICROBATCH, Action, Op
from vpipe.schedules.registry import Recipe
from vpipe.schedules.rounds import Rounds
from vpipe.schedules.size import Placement, Size


@dataclass(frozen=True)
class Seat:
    """What a generator is asked for on behalf of a rank, and what its answer means here.

    A generator knows pipelines with one rank per position. A replica of a stage with w of them has every w-th
    microbatch. Before its first backward it must take as many as keep all ranks behind it at work: of R ranks in its
    own and later stages these are (R-1) // w. So it sits in a pipeline of its own where it has that many positions
    behind it. With equally many replicas everywhere that is its own position among the stages.

    Source of the depths: PipeDream (SOSP 2019), section 3.2.

    Attributes:
        rank: the position that the generator is asked for.
        size: of the pipeline that it is asked for, with the replica's own microbatches.
        stages: of the generator's stages, those of this rank: our numbers.
        replica, width: which of how many it is.
    """

    rank: int
    size: Size
    stages: dict[int, int]
    replica: int
    width: int

    def endless(self) -> Seat:
        """The same seat in a stream of which nobody knows the end."""
        return replace(self, size=replace(self.size, microbatches=sys.maxsize))

    def translated(self, program: Iterable[Action]) -> Iterator[Action]:
        """A generator's actions, with our numbers of stages and microbatches."""
        if self.width == 1 and all(ours == theirs for theirs, ours in self.stages.items()):
            return iter(program)
        return self._translated(program)

    def _translated(self, program: Iterable[Action]) -> Iterator[Action]:
        for action in program:
            number = action.microbatch
            if action.op in PER_MICROBATCH:
                number = number * self.width + self.replica
            yield Action(action.op, self.stages.get(action.stage, action.stage), number)


def seats(recipe: Recipe, placement: Placement, microbatches: int, update_every: int | None) -> tuple[Seat, ...]:
    """The seat of every rank of a schedule over ``placement``, which may name the ranks in any order.

    Raises:
        UserError: the recipe does not hold its stages so, or cannot have these numbers.
    """
    if not placement or microbatches < 1:
        raise UserError(f"{counted(len(placement), 'stage')} and {counted(microbatches, 'microbatch')}",
                        hint="a pipeline needs at least one of each")
    crews = list(dict.fromkeys(placement))  # the ranks at every position of the pipeline
    widths = [len(crew) for crew in crews]
    chunks = _chunks(recipe, placement, crews)
    if recipe.flush and microbatches < max(widths):
        stage = widths.index(max(widths))
        raise UserError(f"{counted(widths[stage], 'replica')} of stage {stage} for "
                        f"{counted(microbatches, 'microbatch')}: some would have nothing to do",
                        hint=f"use {widths[stage]} microbatches or more, or fewer replicas")
    # The replicas of the first stage may have the fewest ranks behind them: 2-1-1 is as deep as its second stage.
    behind = [(sum(widths[position:]) - 1) // widths[position] for position in range(len(crews))]
    depth = max(behind) + 1
    every = _update_every(recipe, depth, microbatches, update_every)
    found: dict[int, Seat] = {}
    for position, crew in enumerate(crews):
        rank = depth - 1 - behind[position]
        stages = {rank: position} if chunks == 1 else {}
        for replica, held_by in enumerate(crew):
            own = len(range(replica, microbatches, len(crew)))
            size = Size(depth, own, chunks, own if recipe.flush else every, len(set(widths)) == 1)
            if (problem := recipe.requires(size)) is not None:
                raise UserError.all_of([problem if len(crew) == 1 or not size.even else Problem(
                    f"a replica of the pipeline takes {own} of {counted(microbatches, 'microbatch')}: {problem.what}",
                    f"for each of the {len(crew)} replicas, {problem.hint}")])
            found[held_by] = Seat(rank, size, stages, replica, len(crew))
    return tuple(found[rank] for rank in sorted(found))


def _chunks(recipe: Recipe, placement: Placement, crews: list[tuple[int, ...]]) -> int:
    """Stages per rank, when the recipe can have that many there."""
    held = Counter(rank for crew in crews for rank in crew)
    if twice := [rank for rank, times in held.items() if times > 1]:
        crew, other = ([crew for crew in crews if twice[0] in crew] * 2)[:2]
        raise UserError(f"rank {twice[0]} is among the ranks {list(crew)} of one stage and {list(other)} of another"
                        if crew != other else f"rank {twice[0]} stands twice among the ranks {list(crew)} of a stage",
                        hint="stages either have all their ranks in common, in the same order, or none"
                        if crew != other else "name each rank once")
    ranks = len(crews)
    chunks, left = divmod(len(placement), ranks)
    word = "rank" if len(held) == ranks else "group of replicas"
    if left or not (chunks == recipe.chunks or recipe.any_chunks):
        raise UserError(f"'{recipe.name}' holds {'equally many' if recipe.any_chunks else recipe.chunks} stage"
                        f"{'s' * (recipe.any_chunks or recipe.chunks > 1)} on each {word}, but "
                        f"{counted(len(placement), 'stage')} on {counted(ranks, word)} are asked for",
                        hint=f"use {ranks * (max(1, chunks) if recipe.any_chunks else recipe.chunks)} stages, or "
                             f"another number of {'ranks' if word == 'rank' else 'groups'}")
    for stage, held_by in enumerate(placement):
        expected = crews[recipe.layout.rank_of(stage, ranks)]
        if held_by != expected and recipe.search is None:
            raise UserError(f"'{recipe.name}' holds stage {stage} where stage {placement.index(expected)} is, on "
                            f"rank {', '.join(map(str, expected))}, but it is placed on rank "
                            f"{', '.join(map(str, held_by))}", hint="place the stages as "
                            f"{[list(crews[recipe.layout.rank_of(s, ranks)]) for s in range(len(placement))]}")
    widths = {len(crew) for crew in crews}
    if len(widths) > 1 and (chunks > 1 or recipe.search is not None):
        raise UserError(f"'{recipe.name}' has equally many replicas of every stage, not "
                        f"{', '.join(str(len(ranks)) for ranks in placement)}", hint="give all stages equally many, "
                        "or take a schedule with one stage per rank, such as 1f1b or pipedream")
    return chunks


def _update_every(recipe: Recipe, depth: int, microbatches: int, update_every: int | None) -> int:
    """Microbatches per update, and replica; the fewest that the recipe can have, when not told."""
    if recipe.flush:
        if update_every not in (None, 1, microbatches):
            raise UserError(f"update_every is {update_every}, but '{recipe.name}' updates once per batch of "
                            f"{counted(microbatches, 'microbatch')}",
                            hint="leave update_every out, or choose a schedule without a flush, such as pipedream")
        return microbatches
    least = recipe.update_every(depth)
    fitting = [n for n in range(1, microbatches + 1) if microbatches % n == 0 and n >= least]
    if not fitting:
        raise UserError(f"'{recipe.name}' on {counted(depth, 'rank')} updates every {least} microbatches or more, "
                        f"but there are only {microbatches}", hint=f"use {least} microbatches or more, or fewer ranks")
    every = fitting[0] if update_every is None else update_every
    if every not in fitting:
        why = (f"is less than the {least} that '{recipe.name}' needs on {counted(depth, 'rank')}" if 0 < every < least
               else f"does not divide {counted(microbatches, 'microbatch')}")
        raise UserError(f"update_every is {every}, which {why}", hint=f"choose one of {fitting}")
    return every


def as_stream(program: Iterator[Action], seat: Seat, rounds: Rounds, stages: list[int]) -> Iterator[Action]:
    """The actions of an endless program on the microbatches, updates and versions that there are.

    See :data:`vpipe.schedules.registry.Program`: what is left out changes nothing about the rest.
    """
    completed, stepped = Counter(dict.fromkeys(stages, 0)), Counter(dict.fromkeys(stages, 0))
    for action in program:
        if _comes(action, rounds):
            yield action
            completed[action.stage] += action.op in COMPLETES
            stepped[action.stage] += action.op is Op.STEP
        elif not any(rounds.exists(completed[stage] * seat.width + seat.replica) or rounds.begins(stage, stepped[stage])
                     for stage in stages):
            return


def _comes(action: Action, rounds: Rounds) -> bool:
    if action.op is Op.STEP:
        return rounds.begins(action.stage, action.microbatch)
    if action.op is Op.USE:
        return action.microbatch == 0 or rounds.begins(action.stage, action.microbatch - 1)
    return rounds.exists(action.microbatch)
