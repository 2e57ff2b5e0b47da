"""Which microbatches a replica takes, and which an update: the arithmetic of replicated stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from vpipe.schedules.size import Placement


@dataclass(frozen=True)
class Rounds:
    """How microbatches are divided among the replicas of a stage and among its updates.

    Microbatch i goes to replica ``i mod width`` of every stage. With a flush an update takes all microbatches. Without
    one it takes a *round*: ``update_every`` on every replica of its stage. The last round of a stream takes what is
    left, so no microbatch is lost, and a replica may have none of it.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.2, 1F1B with round-robin over replicas.

    Attributes:
        placement: ranks per stage.
        update_every: microbatches per update with a flush; per update and replica without.
        flush: whether the pipeline is empty at every update.
        exists: whether there is a microbatch of this number; if so, there are all before it.
    """

    placement: Placement
    update_every: int
    flush: bool
    exists: Callable[[int], bool]

    def width(self, stage: int) -> int:
        """On how many ranks a stage lives."""
        return len(self.placement[stage])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that takes a microbatch through a stage."""
        ranks = self.placement[stage]
        return ranks[microbatch % len(ranks)]

    def replica(self, stage: int, rank: int) -> int:
        """Which replica of a stage a rank is."""
        return self.placement[stage].index(rank)

    def span(self, stage: int) -> int:
        """How many microbatches a whole update of a stage takes."""
        return self.update_every if self.flush else self.update_every * self.width(stage)

    @cached_property
    def per_step(self) -> int:
        """Microbatches until every stage has made whole updates, the same ones: what training counts as a step."""
        return lcm(*(self.span(stage) for stage in range(len(self.placement))))

    def begins(self, stage: int, update: int) -> bool:
        """Whether there is a microbatch for an update of a stage."""
        return self.exists(update * self.span(stage))

    def of_update(self, stage: int, update: int) -> range:
        """The microbatches that an update of a stage takes."""
        return self._existing(update * self.span(stage), self.span(stage))

    def of_step(self, step: int) -> range:
        """The microbatches of a step, see :attr:`per_step`."""
        return self._existing(step * self.per_step, self.per_step)

    def _existing(self, first: int, count: int) -> range:
        beyond = first + count
        while beyond > first and not self.exists(beyond - 1):
            beyond -= 1
        return range(first, beyond)

    def share(self, owner: int, update: int, stage: int, rank: int) -> range:
        """Those of the microbatches of an update of ``owner`` that ``rank`` takes through ``stage``."""
        return self._of_rank(self.of_update(owner, update), stage, rank)

    def whole_share(self, owner: int, update: int, stage: int, rank: int) -> range:
        """The same if the update is a whole one, however many microbatches there are."""
        first = update * self.span(owner)
        return self._of_rank(range(first, first + self.span(owner)), stage, rank)

    def _of_rank(self, taken: range, stage: int, rank: int) -> range:
        width = self.width(stage)
        return range(taken.start + (self.replica(stage, rank) - taken.start) % width, taken.stop, width)

    def contributors(self, owner: int, update: int, stage: int) -> list[int]:
        """The ranks that take any of them, in the order of the replicas."""
        return [rank for rank in self.placement[stage] if self.share(owner, update, stage, rank)]
