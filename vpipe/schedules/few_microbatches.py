"""Warn of too few microbatches to keep the ranks busy."""

from __future__ import annotations

from contextlib import suppress

from vpipe.errors import UserError, counted
from vpipe.schedules.action import Op
from vpipe.schedules.build import build
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.passes import compute_only
from vpipe.schedules.registry import recipe_if_any
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.simulate import simulate

MOST_ACTIONS = 10_000
"""Actions that are simulated, in a third of a second; the bubble of larger schedules is not given."""

ENOUGH = 4
"""Proposed microbatches per stage: with 1F1B they leave a bubble of less than a fifth."""


def few_microbatches(schedule: Schedule, key: str, batch: int | None = None) -> str | None:
    """Return a warning where a schedule with a flush has fewer microbatches than ranks, so that some always wait.

    The ranks are those that a microbatch passes, times the replicas among which microbatches are divided.

    Args:
        schedule: with or without its transfers.
        key: the user's name of the number of microbatches.
        batch: samples of a batch, which the microbatches must divide; None where it is unknown.
    """
    depth, width, count = len(set(schedule.placement)), max(map(len, schedule.placement)), schedule.microbatches
    if not schedule.flush or count >= depth * width:
        return None
    stages = counted(schedule.stages, "stage") + (f" with {width} replicas" if width > 1 else "")
    small = sum(map(len, schedule.programs)) <= MOST_ACTIONS
    left = (f"a bubble of {100 * _bubble(schedule):.0f} % with {schedule.name}, where all stages take equally long"
            if small else "ranks without work")
    return (f"{counted(count, 'microbatch')} for {stages} leave{'s' * (count == 1)} {left}; "
            f"{_remedy(schedule, ENOUGH * depth * width, key, batch)}")


def _remedy(schedule: Schedule, wanted: int, key: str, batch: int | None) -> str:
    fitting = [count for count in range(wanted, schedule.microbatches, -1) if batch is None or batch % count == 0]
    recipe = recipe_if_any(schedule.name)
    if not fitting:
        return f"raise dataset.batch_size, which is {batch}, and {key}"
    if recipe is None or recipe.search is not None:
        return f"raise {key}, at best to {fitting[0]}"
    for count in fitting:
        if 3 * count * schedule.stages > MOST_ACTIONS:
            return f"raise {key}, at best to {count}"
        with suppress(UserError):  # not every schedule takes every number
            share = _bubble(build(schedule.name, schedule.placement, count))
            return f"{key} {count} would leave {100 * share:.0f} %"
    return f"raise {key}"


def _bubble(schedule: Schedule) -> float:
    """Return the share of the time from a rank's first start to its last end in which it waits, at equal stages."""
    computed = compute_only(schedule)
    early = {action.stage for program in computed.programs for action in program if action.op is Op.RECOMPUTE}
    costs = Costs(tuple(StageCosts(1, 1, 1, recompute_s=int(stage in early)) for stage in range(schedule.stages)))
    timeline = simulate(computed, costs)
    return float(timeline.bubble_s / (timeline.bubble_s + max(timeline.work_s)))
