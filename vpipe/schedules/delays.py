"""Count the delay of gradients, in updates: the updates between the weights that made a gradient and its own.

The delay of a microbatch on a stage is the number of updates that the stage has made when the gradient of the
microbatch is applied, less the number that had made the weights which the microbatch used. In the steady state it is
d_s / k on average under ``pipedream``, d_0 / k under ``pipedream_vertical_sync``, 1 under ``2bw``, and 0 with a flush:
d_s are the forwards of stage s before its first backward (:attr:`~vpipe.schedules.schedule.Schedule.warmup`), k the
microbatches of an update on a replica.
"""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule


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
    rule = RegisteredSchedule.named(schedule.name).version_rule if schedule.stream else None
    if rule is not None:
        widths = list(map(len, schedule.placement))
        filled = (max(schedule.warmup) + 1) * max(widths) + 2 * assignment.per_step  # 2bw: two updates more
        first = -(-filled // assignment.per_step) * assignment.per_step
        for microbatch in range(first, first + assignment.per_step):
            version = rule(microbatch, stage, widths, schedule.update_every, schedule.warmup)
            yield microbatch // assignment.per_update(stage) - version
        return
    used = schedule.versions_used
    last = max(0, schedule.microbatches // assignment.per_step - 1)
    for microbatch in assignment.in_step(last):
        yield microbatch // assignment.per_update(stage) - used[stage, microbatch]
