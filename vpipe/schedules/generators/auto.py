"""Auto: the best order that a search finds for the costs and the memory there are."""

from collections.abc import Iterator
from functools import cache

from vpipe.schedules.assignment import Layout, Size
from vpipe.schedules.kinds import Action
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.search.search import search


@cache
def _searched(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Search once for all ranks, at equal costs and without a limit."""
    return search(Layout.LOOP(ranks, chunks), microbatches)


def _peak(rank: int, size: Size) -> int:
    return _searched(size.ranks, size.microbatches, size.chunks).peak_activations[rank]


@register_schedule("auto", flush=True, any_chunks=True, peak_activations=_peak, search=search)
def auto(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """Yield the actions of one rank at equal costs and without a limit on memory.

    The example has one stage per rank. I and W are the input and the weight half of a backward, S is the step.

    ::

        rank 0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 S
        rank 1  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 S

    :func:`~vpipe.schedules.builder.build` takes other costs, limits on memory and placements of any shape. All
    schedules of fixed order that have a flush, run on the placement and keep the limits compete: the bubble is at most
    that of the best of them. Of the orders with the smallest bubble the shortest is taken. A limit on memory counts
    activations from F to I or B, and weight halves from I to W. Any limit that admits one microbatch per stage yields
    an order. Weight halves of a stage run in the order of its microbatches, in which plain PyTorch accumulates
    gradients.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 3.1; Pipeline Parallelism
    with Controllable Memory (arXiv:2405.15362). The search is in :mod:`vpipe.schedules.search.search`.
    """
    yield from _searched(ranks, microbatches, chunks).programs[rank]
