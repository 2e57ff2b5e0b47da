"""A choice that the solver makes, and a candidate: the plan that it finds for a choice, before it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import lcm

from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile
from vpipe.schedules.build import replica_views
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.size import Placement

Stages = tuple[tuple[int, ...], tuple[frozenset[int], ...]]
"""A partition, layers per stage, and the numbers of the recomputed layers of every stage."""


@dataclass(frozen=True)
class Choice:
    """A choice of schedule, microbatches and replicas, for which a partition is searched.

    Attributes:
        placement: ranks per stage; None where every stage may have any number of replicas.
    """

    schedule: str
    microbatches: int
    placement: Placement | None

    @property
    def chunked(self) -> bool:
        """Ranks hold several stages."""
        return self.placement is not None and len(set(self.placement)) < len(self.placement)

    @property
    def replicated(self) -> bool:
        """Stages may have several replicas."""
        return self.placement is None or any(len(ranks) > 1 for ranks in self.placement)

    @property
    def plain(self) -> bool:
        """Every rank holds one stage, and every stage lives on one rank."""
        return not self.chunked and not self.replicated


@dataclass(frozen=True)
class Candidate:
    """A plan, and the cost model's figures for it.

    Attributes:
        schedule: its name.
        microbatches: of a batch.
        update_every: as the request says.
        placement: ranks per stage.
        partition: layers per stage.
        recomputed: per stage the numbers of its recomputed layers.
        seconds_per_sample: by the cost model.
        bound: no plan of this choice takes less, by the cost model; None where that is unknown.
        others: further stages that a simulation may find better.
    """

    schedule: str
    microbatches: int
    update_every: int | None
    placement: Placement
    partition: tuple[int, ...]
    recomputed: tuple[frozenset[int], ...]
    seconds_per_sample: float
    bound: float | None
    others: Sequence[Stages] = ()

    def plan(self, profile: Profile) -> Plan:
        """Return the plan without predictions."""
        recipe, every = recipe_named(self.schedule), None
        if not recipe.flush:
            every = replica_views(recipe, self.placement, self.microbatches, self.update_every)[0].size.update_every
        return Plan(self.partition, stage_to_rank_map=self.placement, schedule=self.schedule,
                    recompute_layers=tuple(tuple(sorted(layers)) for layers in self.recomputed),
                    microbatches=self.microbatches, update_every=every, profile=profile.identity.digest,
                    profiled=asdict(profile.identity))

    @property
    def choice(self) -> Choice:
        return Choice(self.schedule, self.microbatches, self.placement)

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(map(len, self.placement))

    @property
    def actions(self) -> int:
        """About the number of actions that a simulation executes, transfers and sums included."""
        stages, widest, ranks = len(self.placement), max(self.widths), sum(map(len, set(self.placement)))
        recipe, updates = recipe_named(self.schedule), 2
        microbatches = 2 * self.microbatches
        if not recipe.flush:  # the pipeline fills, runs steadily and drains
            every = self.update_every or recipe.update_every(ranks)
            per_step = every * lcm(*self.widths)
            microbatches = (4 + 3 * (ranks + widest) // per_step) * per_step
            updates = microbatches // every
        return 6 * microbatches * stages + 2 * updates * sum(width * width for width in self.widths if width > 1)
