"""An asynchronous pipeline with microbatches in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from vpipe.runtime.outcome import Outcomes
from vpipe.runtime.segment import Segment
from vpipe.runtime.step import Step
from vpipe.schedules.order import Schedule


class Stream:
    """A segment that training has begun and not ended; its steps are what it iterates over.

    Args:
        segment: how long it is follows from its feed.
        steps: the numbers of its steps, as they are made.
        outcomes: what comes out of them.

    Attributes:
        done: steps finished.
        drained: those that draining made, to be yielded when training goes on; None before.
    """

    def __init__(self, segment: Segment, steps: Iterator[int], outcomes: Outcomes) -> None:
        self.segment, self._steps, self._outcomes = segment, steps, outcomes
        self.done = 0
        self.drained: deque[Step] | None = None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        step = next(self._steps)
        self.done += 1
        return self._outcomes.step(self.segment, step)

    def drain(self, schedule: Schedule) -> deque[Step]:
        """Finish what is in flight, and the steps that makes.

        Every rank drains after the same step, so all must agree on the last microbatch that still enters: the last one
        before a pause that is known ahead, or else the latest that any rank may have asked for, rounded up to whole
        steps. Beyond the last finished step these are as many as the replicas of a stage hold in flight, and with
        several replicas those of the next update, which one may have ended when another ends this one, and the next
        forward of each.
        """
        segment, placement = self.segment, schedule.placement
        per_step, widest = segment.rounds.per_step, max(len(ranks) for ranks in placement)
        in_flight = max(len(ranks) * schedule.peak_activations[rank] for ranks in placement for rank in ranks)
        if widest > 1:
            in_flight += (segment.every + 1) * widest
        end = segment.first + -(-(self.done * per_step + in_flight) // per_step) * per_step
        segment.feed.end = end if segment.feed.end is None else min(end, segment.feed.end)
        self.drained = deque()
        self.drained.extend(self)
        return self.drained
