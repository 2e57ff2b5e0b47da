"""Count the delay of gradients, in updates: the updates between the weights that made a gradient and its own.

The delay of a microbatch on a stage is the number of updates that the stage has made when the gradient of the
microbatch is applied, less the number that had made the weights which the microbatch used. In the steady state it is
d_s / k on average under ``pipedream``, d_0 / k under ``pipedream_vertical_sync``, 1 under ``2bw``, and 0 with a flush:
d_s are the forwards of stage s before its first backward (:attr:`~vpipe.schedules.schedule.Schedule.warmup`), k the
microbatches of an update on a replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from operator import gt

from vpipe.errors import counted
from vpipe.schedules.build import SHALLOWER
from vpipe.schedules.graph import Graph
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import default_warmup

LATE = 2.0
"""Mean delay in updates above which a run warns: with a larger one, training loses much."""

_MOST_LISTED = 16
"""Stages of which every delay is listed."""


def mean_delay(schedule: Schedule, stage: int) -> float:
    """Return the mean delay of the gradients of a stage in the steady state, with one rounding."""
    delays = list(_delays(schedule, stage))
    return sum(delays) / len(delays)


def greatest_delay(schedule: Schedule, stage: int) -> int:
    """Return the greatest delay of the gradients of a stage in the steady state."""
    return max(_delays(schedule, stage))


def _delays(schedule: Schedule, stage: int) -> Iterator[int]:
    """Yield the delays of a stage over one step of the steady state: the weight versions repeat with every step.

    Without a closed form of the versions it is the last step of the programs that is complete, if there is one.
    """
    if schedule.flush:
        yield 0
        return
    assignment = schedule.assignment
    rule = recipe_named(schedule.name).version_rule if schedule.stream else None
    if rule is not None:
        widths = list(map(len, schedule.placement))
        filled = (max(schedule.warmup) + 1) * max(widths) + 2 * assignment.per_step  # 2bw: two updates more
        first = -(-filled // assignment.per_step) * assignment.per_step
        for microbatch in range(first, first + assignment.per_step):
            version = rule(microbatch, stage, widths, schedule.update_every, schedule.warmup)
            yield microbatch // assignment.per_update(stage) - version
        return
    used = Graph.from_schedule(schedule).version
    last = max(0, schedule.microbatches // assignment.per_step - 1)
    for microbatch in assignment.in_step(last):
        yield microbatch // assignment.per_update(stage) - used[stage, microbatch]


def describe_delays(schedule: Schedule) -> str | None:
    """Return a line with the mean and the greatest delay of every stage; None where there is no delay."""
    greatest = [greatest_delay(schedule, stage) for stage in range(schedule.stages)]
    if not any(greatest):
        return None
    means = [f"{mean_delay(schedule, stage):.3g}" for stage in range(schedule.stages)]
    if schedule.stages > _MOST_LISTED:
        return (f"delay of gradients in updates: mean {means[0]} at stage 0 to {means[-1]} at stage "
                f"{schedule.stages - 1}, greatest {max(greatest)}")
    return (f"delay of gradients in updates, by stage: mean {' '.join(means)}, greatest "
            f"{' '.join(map(str, greatest))}")


def warn_of_delay(schedule: Schedule, remedies: list[str]) -> str | None:
    """Return a warning where the gradients of a stage are late by more than :data:`LATE` updates on average.

    Args:
        remedies: what would lower the delay, or its cost.
    """
    means = [mean_delay(schedule, stage) for stage in range(schedule.stages)]
    if max(means) <= LATE:
        return None
    ahead = schedule.stream and any(map(gt, schedule.warmup, default_warmup(list(map(len, schedule.placement)))))
    remedies = [*remedies, *[SHALLOWER] * ahead, "fewer stages",
                "a schedule with a flush, which has no delay"]
    return (f"the gradients of stage {means.index(max(means))} are {max(means):.3g} updates late on average, "
            f"so each update lowers the loss less; better are: {'; '.join(remedies)}")


def fewer_updates(schedule: Schedule, microbatches: int, batch: int | None = None,
                  keys: tuple[str, str] = ("microbatches", "update_every")) -> str | None:
    """Return the smallest settings with which no gradient is a whole update late on average, and the delay then.

    An update of each replica then takes more microbatches than it starts before its first backward.

    Args:
        microbatches: of a batch.
        batch: its samples, which microbatches must divide; None where that is unknown.
        keys: the user's names of the microbatches of a batch, and of those of an update and replica.

    Returns:
        None where updates are that large, or the delay does not depend on their size.
    """
    if not schedule.stream or schedule.update_every > max(schedule.warmup):
        return None
    least, replicas = max(schedule.warmup) + 1, lcm(*map(len, schedule.placement))
    fitting = [(microbatches, k) for k in range(least, microbatches + 1) if microbatches % k == 0]
    fitting += [(replicas * k, k) for k in range(least, 2 * least + 1) if batch is None or batch % (replicas * k) == 0]
    if not fitting:
        return None
    count, every = fitting[0]
    larger = replace(schedule, update_every=every)
    delay = max(mean_delay(larger, stage) for stage in range(schedule.stages))
    samples = None if batch is None else counted(batch // count * larger.assignment.per_step, "sample")
    size = f"; an update is then {samples}" if samples else ""
    return (f"{keys[0]} {count} and " * (count != microbatches) + f"{keys[1]} {every}"
            f" ({delay:.3g} updates late{size})")
