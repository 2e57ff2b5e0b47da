"""Write the programs of schedules whose microbatches enter the pipeline at both ends.

Every stage has two copies, on rank s and on rank p-1-s (:func:`~vpipe.schedules.size.both_ways`). Even microbatches go
down the ranks, odd ones up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vpipe.errors import Problem, counted
from vpipe.schedules.action import Action
from vpipe.schedules.size import Size


def unfolded(vee: Callable[[int, int, int], Iterator[Action]], rank: int, ranks: int,
             microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p in the schedule of which a V over p/2 ranks is the half.

    Rank h of such a V holds stages h and p-1-h. So do ranks h and p-1-h here. Each of the two does what the V's rank
    does, with half of the microbatches: with the even ones on the stage that it holds for the way down, with the odd
    ones on the other.
    """
    for action in vee(min(rank, ranks - 1 - rank), ranks // 2, microbatches // 2):
        yield action._replace(index=2 * action.index + (action.stage != rank)) \
            if action.op.per_microbatch else action


def odd_ranks(name: str, size: Size) -> Problem | None:
    """Return what is wrong with an odd number of ranks, of which one would be its own opposite; None if it is even."""
    if size.ranks % 2 == 0:
        return None
    even = " or ".join(str(ranks) for ranks in (size.ranks - 1, size.ranks + 1) if ranks)
    return Problem(f"'{name}' sends microbatches both ways through an even number of ranks, one stage each, but there "
                   f"{'is' if size.ranks == 1 else 'are'} {counted(size.ranks, 'rank')}", f"use {even} ranks")
