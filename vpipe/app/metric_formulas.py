"""Compute the figures of a run, for every place that shows them; docs/metrics.md defines them."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import quantiles

from vpipe import Cut, Order, Plan
from vpipe.errors import UserError
from vpipe.schedules import RegisteredSchedule, Schedule

bubble = Plan.bubble_of

WARM_UP = 2
"""First updates of an attempt that figures leave out, if as many again and one more follow: a process allocates memory
and agrees on shapes in them."""

RECENT = 20
"""Updates over which the speed shown while training is averaged."""


def counted_updates(update_s: Sequence[float]) -> Sequence[float]:
    """Return the times of the updates that figures are of: all but the first :data:`WARM_UP`."""
    return update_s[WARM_UP:] if len(update_s) > 2 * WARM_UP else update_s


def p95(values: Sequence[float]) -> float:
    """Return what 95 % of at least one value do not exceed, interpolated between two of them."""
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]


def averaged_losses(count: int) -> int:
    """Return how many of ``count`` losses are averaged at either end of a run."""
    return max(1, min(10, count // 4))


def perplexity(loss: float) -> float | None:
    """Return exp(loss), for a loss that is the mean cross-entropy per token; None where it is huge or no number."""
    return exp(loss) if loss < 100 else None  # that of a huge loss says nothing, and soon is no float


def share_text(share: float | None) -> str:
    """Return ``27.0 %``; a utilization above 100 %, which cannot be, is marked."""
    return "-" if share is None else f"{100 * share:.1f} %" + " (!)" * (share > 1)


ENOUGH, MOST_SIMULATED = 0.15, 10_000
"""Share of an update below which a bubble is small; forwards and backwards that are simulated only to know it."""


def enough_microbatches(order: Order, cut: Cut, samples: int) -> int:
    """Return the fewest microbatches of a batch with which a schedule with a flush has a bubble below 15 %.

    As many as it can have where none are enough. A backward takes as long as two forwards, a transfer no time; 1F1B's
    bubble stands for one that would take long to simulate, and for that of an order that is searched.
    """
    from vpipe.schedules import Costs, build, simulate  # here, for most configs need no simulator

    registered, slices, enough = RegisteredSchedule.named(order.schedule), order.slices or 1, 1
    chunks, width, waiting = order.chunks or registered.chunks, cut.replicas, cut.count - 1
    placement = cut.placement or tuple(tuple(rank * width + copy for rank in ranks for copy in range(width))
                                       for ranks in registered.placement(cut.count // chunks, chunks))
    costs = Costs.of_ranks(placement, slices=slices)
    for count in [count for count in range(1, min(samples, Schedule.MOST_MICROBATCHES) + 1) if samples % count == 0]:
        share = waiting / (waiting + count * slices / width)
        if registered.search is None and 2 * len(placement) * count * slices <= MOST_SIMULATED:
            try:
                share = float(simulate(build(registered.name, placement, count, slices=slices), costs).bubble_share)
            except UserError:  # it cannot have so many
                continue
        enough = count
        if share < ENOUGH:
            break
    return enough
