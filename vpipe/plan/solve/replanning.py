"""A better partition from what a run has measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from vpipe.plan.costs import stage_costs
from vpipe.plan.held import Held
from vpipe.plan.profile import Profile
from vpipe.plan.recompute import ranges
from vpipe.plan.solve.cuts import Cutter, Floats, Integers, smallest_greatest
from vpipe.plan.solve.scope import behind_of
from vpipe.schedules.size import Placement


def better_partition(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                     placement: Placement, measured_stage_s: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """The partition that balances a run by its own figures, and how much faster its slowest stage gets.

    A stage that took longer than the profile says makes each of its layers longer by the same factor. A layer that is
    recomputed now stays so wherever it goes. Where ranks hold several stages these are balanced as if each were alone.

    Args:
        partition: layers per stage, now.
        recomputed: per stage the layers that are recomputed.
        placement: ranks per stage.
        measured_stage_s: per stage, forward, backward and recomputation of one microbatch.

    Returns:
        The partition; and the share of the time of the slowest stage, per replica, that it saves, 0 when the one
        there is cannot be bettered.
    """
    held, times, dropped = Held(profile), np.zeros(len(profile.layers)), frozenset[int]().union(*recomputed)
    for layers, again, measured in zip(ranges(partition), recomputed, measured_stage_s, strict=True):
        cost = stage_costs(profile, layers, again, held=held)
        factor = measured / float(cost.forward_s + cost.input_s + cost.weight_s + cost.recompute_s)
        for number in layers:
            layer = profile.layers[number]
            own = layer.forward.median + layer.backward.median + (number in dropped) * layer.recompute.median
            times[number] = factor * own
    running = np.concatenate([[0.0], np.cumsum(times)])
    if len(set(placement)) < len(placement):
        placement = tuple((stage,) for stage in range(len(placement)))
    widths = behind_of(placement)

    def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        own = (running[stop] - running[first]) / width
        return own, own

    found = smallest_greatest(Cutter(len(times), widths, max(widths), running,
                                     {width: float(width) for (width,) in widths.values()}, evaluate))
    assert found is not None, "the partition there is can be had"
    stops = np.cumsum(partition)
    now = max((running[stops] - running[stops - partition]) / [len(crew) for crew in placement])
    gain = float(1 - found.greatest / now)
    if gain <= 0:
        return tuple(partition), 0.0
    return tuple(part.stop - part.first for part in found.parts), gain
