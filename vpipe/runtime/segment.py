"""A stretch of work from an empty pipeline to an empty pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from vpipe.runtime.feed import Feed, Signature
from vpipe.schedules.rounds import Rounds


@dataclass
class Segment:
    """Which microbatches, and how they count.

    Attributes:
        feed: where microbatches come from.
        first: the feed's number of the segment's microbatch 0.
        base: the run's number of the segment's microbatch 0, counted over all training.
        steps_before: of the run, before the segment.
        rounds: who takes which of the segment's microbatches, and which update does.
        training: False for forward only.
    """

    feed: Feed
    first: int
    base: int
    steps_before: int
    rounds: Rounds
    training: bool

    @property
    def every(self) -> int:
        """Microbatches per update; without a flush, and replica."""
        return self.rounds.update_every

    def number(self, microbatch: int) -> int:
        """The run's number of a microbatch."""
        return self.base + microbatch

    def update_number(self, stage: int, update: int) -> int:
        """The run's number of an update, or version, of a stage, whatever made the updates before this segment."""
        return self.steps_before * self.rounds.per_step // self.rounds.span(stage) + update

    def signature(self, microbatch: int) -> Signature:
        """The shapes of a microbatch's fields."""
        return self.feed.signature(self.first + microbatch)
