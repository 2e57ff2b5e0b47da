"""A plan before it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import lcm

from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile
from vpipe.schedules.build import replica_views
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.size import Placement


@dataclass(frozen=True)
class Draft:
    """A plan, and what the solver's formula says of it.

    Attributes:
        schedule: its name.
        microbatches: of a batch.
        update_every: as it was asked for.
        placement: ranks per stage.
        partition: layers per stage.
        recomputed: per stage the numbers of its recomputed layers.
        seconds_per_sample: by formula.
        bound: no plan with these schedule, microbatches and widths takes less, by formula; None where that is unknown.
        others: further partitions, with their recomputed layers, that a simulation may find better.
    """

    schedule: str
    microbatches: int
    update_every: int | None
    placement: Placement
    partition: tuple[int, ...]
    recomputed: tuple[frozenset[int], ...]
    seconds_per_sample: float
    bound: float | None
    others: Sequence[tuple[tuple[int, ...], tuple[frozenset[int], ...]]] = ()

    def plan(self, profile: Profile) -> Plan:
        """As a plan without predictions."""
        recipe, every = recipe_named(self.schedule), None
        if not recipe.flush:
            every = replica_views(recipe, self.placement, self.microbatches, self.update_every)[0].size.update_every
        return Plan(self.partition, stage_to_rank_map=self.placement, schedule=self.schedule,
                    recompute_layers=tuple(tuple(sorted(layers)) for layers in self.recomputed),
                    microbatches=self.microbatches, update_every=every, profile=profile.identity.digest,
                    profiled=asdict(profile.identity))

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(map(len, self.placement))

    @property
    def recomputes(self) -> bool:
        """Whether anything is recomputed."""
        return any(self.recomputed)

    @property
    def actions(self) -> int:
        """About how many a simulation has to go through, transfers and sums included."""
        stages, widest, ranks = len(self.placement), max(self.widths), sum(map(len, set(self.placement)))
        recipe, updates = recipe_named(self.schedule), 2
        microbatches = 2 * self.microbatches
        if not recipe.flush:  # filled, a steady state, emptied
            every = self.update_every or recipe.update_every(ranks)
            per_step = every * lcm(*self.widths)
            microbatches = (4 + 3 * (ranks + widest) // per_step) * per_step
            updates = microbatches // every
        return 6 * microbatches * stages + 2 * updates * sum(width * width for width in self.widths if width > 1)
