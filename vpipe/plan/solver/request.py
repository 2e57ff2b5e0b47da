"""The request for a plan, and how other plans compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vpipe.description.cut import Recompute
from vpipe.errors import UserError
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile
from vpipe.plan.solver.choice import Choice
from vpipe.schedules.assignment import Placement
from vpipe.schedules.registry import RegisteredSchedule

MOST_RANKS, MOST_LAYERS = 16, 200
"""So many of each are few, see :attr:`PlanRequest.small`."""


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan. What is None is searched; what is given stays."""

    # of one model, by the number of microbatches of a batch, each at the size of its microbatches
    profiles: Mapping[int, Profile]
    ranks: int  # how many there are; all are used
    memory_bytes: int | None = None  # that the process of each rank may take; None is no limit
    # the names to choose from, all with a flush or all without; by default all with a flush that are registered as
    # planned
    schedules: tuple[str, ...] = field(default_factory=lambda: RegisteredSchedule.for_plans(flush=True))
    # microbatches per update, and replica, of schedules without a flush, by number of microbatches; the fewest
    # possible where one is not named
    update_every: Mapping[int, int | None] = field(default_factory=dict)
    placement: Placement | None = None  # ranks per stage
    partition: tuple[int, ...] | None = None  # layers per stage
    recompute: Recompute | None = None  # a share, or per stage a share or layers, as in a config
    stages: int | None = None  # how many, all with equally many replicas, as few as can be
    known: tuple[Plan, ...] = ()  # plans that the answer must not be slower than, such as the one a config says
    # forwards of every stage before its first backward, for a placement; auto: as few as hide the transfers. Those of
    # 1F1B when None
    warmup: tuple[int, ...] | Literal["auto"] | None = None
    # exact, or vpipe: the heuristic of the VPipe paper, see vpipe.plan.solver.vpipe_heuristic
    solver: Literal["exact", "vpipe"] = "exact"
    slices: int = 1  # of every microbatch, under schedules that take slices
    # update_every is of all replicas of a stage together, of which every stage then has equally many
    shared_updates: bool = False

    def __post_init__(self) -> None:
        named = {rank for ranks in self.placement or () for rank in ranks}
        if self.placement and len(named) != self.ranks:
            raise UserError(f"the placement names {len(named)} ranks, but there are {self.ranks}",
                            hint="name every rank, or leave the placement out")
        if self.partition and sum(self.partition) != self.layers:
            raise UserError(f"the partition {list(self.partition)} is one of {sum(self.partition)} layers, but the "
                            f"profiled model has {self.layers}", hint="plan with a profile of the same model")
        if self.partition is None and isinstance(self.recompute, Sequence) and len(
                {isinstance(entry, (int, float)) for entry in self.recompute}) > 1:
            raise UserError("recompute has shares and lists of layers, while the partition is free",
                            hint="give the partition, or shares alone, or lists alone")
        if self.partition and self.placement and len(self.partition) != len(self.placement):
            raise UserError(f"the partition has {len(self.partition)} stages, the placement {len(self.placement)}",
                            hint="give both equally many, or leave one out")

    def choice(self, schedule: str, microbatches: int) -> Choice:
        """Return the choice of a schedule and of microbatches, with what is given, and replicas open elsewhere."""
        registered = RegisteredSchedule.named(schedule)
        return Choice(schedule, microbatches, None if registered.flush else self.update_every.get(microbatches),
                      self.ranks, self.placement, self.warmup if registered.any_warmup else None,
                      self.slices if registered.sliced else 1)

    @property
    def with_zero1(self) -> PlanRequest:
        """The request for replicas that share the optimizer's state."""
        return replace(self, known=(), profiles={count: replace(profile, zero1=True)
                                                 for count, profile in self.profiles.items()})

    @property
    def small(self) -> bool:
        """Unequal replicas can be searched, and the solver can be asked again and again, without taking minutes."""
        return self.ranks <= MOST_RANKS and self.layers <= MOST_LAYERS

    @property
    def process_bytes(self) -> int:
        """Of the memory of a rank, what its process takes besides tensors and their allocator."""
        return max(profile.process_bytes for profile in self.profiles.values())

    @property
    def kept_share(self) -> float:
        """Of the bytes of tensors, what their allocator keeps besides."""
        return max(profile.kept_share for profile in self.profiles.values())

    @property
    def tensor_bytes(self) -> int | None:
        """The bytes of the layers that each rank may hold; None is no limit."""
        if self.memory_bytes is None:
            return None
        return math.floor((self.memory_bytes - self.process_bytes) / (1 + self.kept_share))

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(next(iter(self.profiles.values())).layers)


@dataclass(frozen=True)
class Alternative:
    """The best plan with another choice in one respect."""

    what: str  # the other choice, for messages: schedule gpipe
    plan: Plan | None = None  # with its predictions where it was simulated; None when nothing fits
    seconds_per_sample: float | None = None  # predicted; None when nothing fits
    simulated: bool = False  # predicted by simulation, as the chosen plan, or by the cost model, which is coarser
    why: str = ""  # there is no plan
