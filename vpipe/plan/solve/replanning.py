"""A better partition from what a run has measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from vpipe.errors import UserError
from vpipe.plan.costs import stage_costs
from vpipe.plan.held import Held
from vpipe.plan.plan import Plan
from vpipe.plan.predict import predict
from vpipe.plan.profile import Profile, Seconds
from vpipe.plan.recompute import ranges
from vpipe.plan.solve.request import Request
from vpipe.plan.solve.solve import solve

_TIMES = ("forward", "backward", "input_half", "weight_half", "recompute")


def better_partition(request: Request, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                     measured_stage_s: Sequence[float]) -> tuple[Plan | None, float]:
    """The plan with another partition that is faster by a run's own figures and fits, and how much faster a step gets.

    A stage that took longer than the profile says makes each of its layers longer by the same factor. Both partitions
    are simulated, so where ranks share cores a partition is not better for being even.

    Args:
        request: of the run: one profile, one schedule, its placement.
        partition: layers per stage, now.
        recomputed: per stage the layers that are recomputed, now.
        measured_stage_s: per stage, forward, backward and recomputation of one microbatch.

    Returns:
        The plan, None when the partition there is cannot be bettered; and the share of the time of a step that it
        saves.
    """
    [(microbatches, profile)], [schedule] = request.profiles.items(), request.schedules
    scaled = _scaled(profile, partition, recomputed, measured_stage_s)
    now = Plan(tuple(partition), stage_to_rank_map=request.placement or (), schedule=schedule,
               recompute_layers=tuple(tuple(sorted(own)) for own in recomputed), microbatches=microbatches,
               update_every=request.update_every.get(microbatches))
    try:
        found = solve(replace(request, profiles={microbatches: scaled}, partition=None)).plan
    except UserError:  # nothing fits, by the solver's count
        return None, 0.0
    assert found.predictions is not None, "a solution's plan has them"
    gain = 1 - found.predictions.step_s / predict(scaled, now).prediction.step_s
    return (found, gain) if gain > 0 and found.partition != now.partition else (None, 0.0)


def _scaled(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
            measured_stage_s: Sequence[float]) -> Profile:
    """The profile with the layers of each stage as fast as that was. Ranks that share cores measure each other's work,
    too: then only how the stages differ counts, not how long they take."""
    held, expected = Held(profile), []
    for layers, again in zip(ranges(partition), recomputed, strict=True):
        cost = stage_costs(profile, layers, again, held=held)
        expected.append(float(cost.forward_s + cost.input_s + cost.weight_s + cost.recompute_s))
    shared = profile.cores is not None and profile.identity.ranks_per_host > profile.cores
    all_alike = sum(measured_stage_s) / sum(expected) if shared else 1.0
    made = list(profile.layers)
    for layers, own, measured in zip(ranges(partition), expected, measured_stage_s, strict=True):
        factor = measured / own / all_alike
        for number in layers:
            slowed: dict[str, Any] = {figure: Seconds(factor * seconds.median, seconds.spread) for figure in _TIMES
                                      for seconds in [getattr(made[number], figure)]}
            made[number] = replace(made[number], **slowed)
    return replace(profile, layers=tuple(made))
