"""Strategies for hypothesis: placements, partitions, ties, schedules, orders of actions, plans.

Without hypothesis the import of this file is refused with the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from vpipe.description.cut import Cut
from vpipe.description.order import Asynchronous, Order
from vpipe.errors import UserError
from vpipe.plan.plan import Plan
from vpipe.schedules.assignment import Placement, stages_of_rank
from vpipe.schedules.builder import build
from vpipe.schedules.checker import check
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule

try:
    from hypothesis import reject
    from hypothesis import strategies as st
except ModuleNotFoundError as missing:
    raise UserError("the strategies of vpipe.testing need hypothesis, which is not installed",
                    hint="pip install hypothesis") from missing


@st.composite
def placements(draw: st.DrawFn, most_stages: int = 4, most_replicas: int = 3) -> Placement:
    """Draw the ranks of every stage: one or several replicas, on ranks in any order."""
    widths = draw(st.lists(st.integers(1, most_replicas), min_size=1, max_size=most_stages))
    ranks = iter(draw(st.permutations(range(sum(widths)))))
    return tuple(tuple(next(ranks) for _ in range(width)) for width in widths)


@st.composite
def partitions(draw: st.DrawFn, layers: int, stages: int | None = None) -> tuple[int, ...]:
    """Draw the layers of each stage, at least one; of any number of stages when ``stages`` is None."""
    count = draw(st.integers(1, layers)) if stages is None else stages
    cuts = draw(st.sets(st.integers(1, layers - 1), min_size=count - 1, max_size=count - 1)) if count > 1 else set()
    return tuple(end - start for start, end in pairwise([0, *sorted(cuts), layers]))


@st.composite
def ties(draw: st.DrawFn, stages: int, most: int = 2) -> dict[int, tuple[int, ...]]:
    """Draw which stages borrow weights of earlier ones: a few owners, each with later stages."""
    owners = draw(st.sets(st.integers(0, stages - 2), max_size=most)) if stages > 1 else set()
    return {owner: tuple(sorted(draw(st.sets(st.integers(owner + 1, stages - 1), min_size=1, max_size=3))))
            for owner in sorted(owners)}


@st.composite
def schedules(draw: st.DrawFn, names: Sequence[str] = (), most_ranks: int = 8, most_microbatches: int = 24) -> Schedule:
    """Draw a schedule that passes the checker, transfers included: of any registered name, or one of ``names``.

    Its stages lie on ranks in any order; weights may be tied, gradients clipped, stages recomputed.
    """
    recipe = RegisteredSchedule.named(draw(st.sampled_from(list(names) or RegisteredSchedule.names())))
    ranks = draw(st.integers(1, max(1, most_ranks // recipe.chunks)))
    every = None if recipe.flush else draw(st.integers(0, 3)) + recipe.update_every(ranks)
    microbatches = draw(st.integers(ranks, max(ranks, most_microbatches)))
    numbers = draw(st.permutations(range(ranks)))
    placement = tuple(tuple(numbers[rank] for rank in held_by) for held_by in recipe.layout(ranks, recipe.chunks))
    for count in [microbatches, *(-(-microbatches // part) * part for part in (every, ranks, 2 * ranks) if part)]:
        tied, norm = draw(ties(len(placement))), draw(st.booleans())
        recomputed = draw(st.sets(st.integers(0, len(placement) - 1)))
        try:
            schedule = lower(build(recipe.name, placement, count, every, tied, recomputed), norm)
        except UserError:  # not of these numbers
            continue
        check(schedule)
        return schedule
    reject()


@st.composite
def orders(draw: st.DrawFn, most_ranks: int = 4, most_stages: int = 8, most_microbatches: int = 4) -> Schedule:
    """Draw a schedule of no generator's: ranks do any action that they can at any time, without transfers.

    Backwards are whole or in halves, stages lie anywhere, weights may be tied.
    """
    ranks, microbatches = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_microbatches))
    stages = draw(st.integers(ranks, most_stages))
    homes = [*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(stages - ranks))]
    placement = tuple((rank,) for rank in draw(st.permutations(homes)))
    halved = draw(st.sets(st.integers(0, stages - 1)))
    left: dict[Action, list[Action]] = {}  # what every action waits for
    for microbatch in range(microbatches):
        for stage in range(stages):
            returning = Op.INPUT if stage in halved else Op.BACKWARD
            after = Op.INPUT if stage + 1 in halved else Op.BACKWARD
            forward = Action(Op.FORWARD, stage, microbatch)
            left[forward] = [Action(Op.FORWARD, stage - 1, microbatch)]
            left[Action(returning, stage, microbatch)] = [forward, Action(after, stage + 1, microbatch)]
            if stage in halved:
                left[Action(Op.WEIGHT, stage, microbatch)] = [Action(Op.INPUT, stage, microbatch)]
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    picks = draw(st.randoms(use_true_random=False))
    while left:
        action = picks.choice([action for action, before in left.items() if not any(one in left for one in before)])
        del left[action]
        programs[placement[action.stage][0]].append(action)
    for rank, program in enumerate(programs):
        program += [Action(Op.STEP, stage, 0) for stage in stages_of_rank(placement, rank)]
    return Schedule("any", placement, tuple(map(tuple, programs)), microbatches, microbatches, flush=True,
                    peak_activations=(microbatches * stages,) * ranks, versions=(1,) * stages, ties=draw(ties(stages)))


@st.composite
def plans(draw: st.DrawFn, layers: int, names: Sequence[str] = ("1f1b", "gpipe", "zb_h1", "pipedream", "2bw"),
          most_stages: int = 4, most_replicas: int = 3) -> Plan:
    """Draw a plan for so many layers: any partition, ranks and recomputed layers, under one of ``names``.

    Those named must take replicas of stages, and one stage per rank.
    """
    placement = draw(placements(min(most_stages, layers), most_replicas))
    partition = draw(partitions(layers, len(placement)))
    first = [sum(partition[:stage]) for stage in range(len(partition))]
    recompute = [draw(st.just(0.0) | st.just(1.0) | st.sets(st.integers(start, start + count - 1)).map(sorted))
                 for start, count in zip(first, partition, strict=True)]
    recipe = RegisteredSchedule.named(draw(st.sampled_from(names)))
    widest, least = max(map(len, placement)), recipe.update_every(len(placement) * most_replicas)
    if recipe.flush:
        return Plan(Cut(partition, recompute, placement), Order(recipe.name), draw(st.integers(widest, 2 * widest + 4)))
    every = draw(st.integers(least, least + 2))
    return Plan(Cut(partition, recompute, placement), Asynchronous(recipe.name, update_every=every),
                every * draw(st.integers(1, 3)))
