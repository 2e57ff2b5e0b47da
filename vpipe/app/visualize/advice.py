"""Say in words what a schedule costs a run, and what would cost less: too few microbatches, late gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from operator import gt

from vpipe import Cut, Order
from vpipe.app.metric_formulas import enough_microbatches
from vpipe.errors import counted
from vpipe.schedules import RegisteredSchedule, Schedule, delays

LATE = 2.0
"""Mean delay in updates above which a run warns: with a larger one, training loses much."""

_MOST_LISTED = 16
"""Stages of which every delay is listed."""


@dataclass(frozen=True)
class Advice:
    """Advice on a schedule to those who run it.

    Attributes:
        schedule: with or without its transfers.
        microbatches: of a batch.
        batch: samples of a batch, which the microbatches must divide.
    """

    schedule: Schedule
    microbatches: int
    batch: int

    @cached_property
    def mean_delays(self) -> list[float]:
        """By stage, the mean delay of its gradients in updates; see :mod:`vpipe.schedules.delays`."""
        return [delays.mean_delay(self.schedule, stage) for stage in range(self.schedule.stages)]

    @cached_property
    def delays(self) -> str | None:
        """A line with the mean and the greatest delay of every stage; None where there is no delay."""
        greatest = [delays.greatest_delay(self.schedule, stage) for stage in range(self.schedule.stages)]
        if not any(greatest):
            return None
        means = [f"{delay:.3g}" for delay in self.mean_delays]
        if len(means) > _MOST_LISTED:
            return (f"delay of gradients in updates: mean {means[0]} at stage 0 to {means[-1]} at stage "
                    f"{len(means) - 1}, greatest {max(greatest)}")
        return (f"delay of gradients in updates, by stage: mean {' '.join(means)}, greatest "
                f"{' '.join(map(str, greatest))}")

    def late_gradients(self, *remedies: str) -> str | None:
        """Return a warning where the gradients of a stage are late by more than :data:`LATE` updates on average.

        Args:
            remedies: what else would lower the delay, or its cost; after :attr:`fewer_updates`.
        """
        schedule, means = self.schedule, self.mean_delays
        if max(means) <= LATE:
            return None
        ahead = schedule.stream and any(map(
            gt, schedule.warmup, Schedule.default_warmup(list(map(len, schedule.placement)))))
        better = [*filter(None, [self.fewer_updates]), *remedies, *["a lower warmup_depth"] * ahead, "fewer stages",
                  "a schedule with a flush, which has no delay"]
        return (f"the gradients of stage {means.index(max(means))} are {max(means):.3g} updates late on average, "
                f"so each update lowers the loss less; better are: {'; '.join(better)}")

    @cached_property
    def fewer_updates(self) -> str | None:
        """The smallest settings with which no gradient is a whole update late on average, and the delay then.

        An update of each replica then takes more microbatches than it starts before its first backward. None where
        updates are that large, or the delay does not depend on their size.
        """
        schedule, microbatches, batch = self.schedule, self.microbatches, self.batch
        if not schedule.stream or schedule.update_every > max(schedule.warmup):
            return None
        least, replicas = max(schedule.warmup) + 1, lcm(*map(len, schedule.placement))
        fitting = [(microbatches, k) for k in range(least, microbatches + 1) if microbatches % k == 0]
        fitting += [(replicas * k, k) for k in range(least, 2 * least + 1) if batch % (replicas * k) == 0]
        if not fitting:
            return None
        count, every = fitting[0]
        larger = replace(schedule, update_every=every)
        delay = max(delays.mean_delay(larger, stage) for stage in range(schedule.stages))
        samples = counted(batch // count * larger.assignment.per_step, "sample")
        return (f"training.num_microbatches {count} and " * (count != microbatches) + f"parallel.update_every {every}"
                f" ({delay:.3g} updates late; an update is then {samples})")

    @property
    def few_microbatches(self) -> str | None:
        """A warning where a schedule with a flush has fewer microbatches than ranks, so that some always wait.

        The ranks are those that a microbatch passes, times the replicas among which microbatches are divided.
        """
        schedule = self.schedule
        depth = len(set(map(frozenset, schedule.placement)))  # copies on the same ranks need no more microbatches
        width, count = max(map(len, schedule.placement)), schedule.microbatches // schedule.slices
        if not schedule.flush or schedule.microbatches >= depth * width or not RegisteredSchedule.find(schedule.name):
            return None
        order = Order(schedule.name, slices=schedule.slices)
        enough = enough_microbatches(order, Cut(ranks=schedule.placement), self.batch)
        better = f"raise training.num_microbatches, at best to {enough}" if enough > count else (
            f"raise dataset.batch_size, which is {self.batch}, and training.num_microbatches")
        stages = counted(schedule.stages, "stage") + (f" with {width} replicas" if width > 1 else "")
        cut = f" in {schedule.slices} slices" * (schedule.slices > 1)
        return (f"{counted(count, 'microbatch')}{cut} for {stages} leave{'s' * (count == 1)} ranks without work; "
                f"{better}")
