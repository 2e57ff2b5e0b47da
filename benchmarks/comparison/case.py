"""What is compared: a model on emulated devices, the systems' plans for it, and what they predict."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from bert_large import bert_large
from gpu import FLAT, MEMORY_BYTES, PUBLISHED, Curve
from ranks import Contender

from vpipe.errors import UserError
from vpipe.extras.comparison.systems import SYSTEMS, System, microbatch_counts, plan_system
from vpipe.plan.plan import Plan, Prediction
from vpipe.plan.profile import Profile
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.solve import solve
from vpipe.schedules.registry import RegisteredSchedule

RANKS = 8
PLACEMENT = tuple((rank,) for rank in range(RANKS))
BATCH = 512
"""Samples per update with a flush: 32 minibatches of 16, as VPipe's bsp has them."""


@dataclass(frozen=True)
class Case:
    """One setting.

    Attributes:
        tokens: per sample.
        curve: how fast a device computes.
        as_published: microbatches of 16, 16 and 4, and an update per microbatch without a flush; else each system has
            the microbatches that are best for it, and all an update per :data:`BATCH` samples.
        step_passes: how many times as long as a fused Adam step an optimizer step takes.
        memory_bytes: of a device.
    """

    tokens: int = 128
    curve: Curve = PUBLISHED
    as_published: bool = False
    step_passes: float = 1.0
    memory_bytes: int = MEMORY_BYTES

    def profile(self, microbatches: int) -> Profile:
        """Of microbatches so many to a batch."""
        return bert_large(BATCH // microbatches, self.tokens, self.curve, self.step_passes)


PUBLISHED_SIZES = {"gpipe": 16, "pipedream": 4, "vpipe": 16}


@dataclass(frozen=True)
class Run:
    """A system in a case, with its best plan.

    Attributes:
        name: of the system.
        case: which.
        plan: of the best microbatch.
        microbatch_size: its samples.
        largest_size: the largest microbatch that fits; None where one size was prescribed and no other tried.
    """

    name: str
    case: Case
    plan: Plan
    microbatch_size: int
    largest_size: int | None

    @property
    def prediction(self) -> Prediction:
        """By the simulator."""
        assert self.plan.predictions is not None, "the solver predicts"
        return self.plan.predictions

    @property
    def samples_per_s(self) -> float:
        """Predicted."""
        return 1 / self.prediction.seconds_per_sample

    def contender(self) -> Contender:
        """The same, to be run."""
        assert self.plan.microbatches is not None
        return Contender(self.name, self.plan.schedule or "", self.case.profile(self.plan.microbatches),
                         self.plan.partition, tuple(tuple(sorted(layers)) for layers in self.plan.recomputed),
                         self.plan.microbatches, self.plan.update_every, BATCH)

    def parts_s(self) -> dict[str, float]:
        """Where the time of a sample goes, in seconds of a rank (the mean over ranks); they add up."""
        layers = self.case.profile(BATCH // self.microbatch_size).layers
        ideal = bert_large(self.microbatch_size, self.case.tokens, FLAT).layers
        per = 1 / RANKS / self.microbatch_size
        compute = per * sum(layer.forward.median + layer.backward.median for layer in ideal)
        work = per * sum(layer.forward.median + layer.backward.median for layer in layers)
        again = per * sum(layers[number].recompute.median for own in self.plan.recomputed for number in own)
        updates = self.plan.update_every or self.plan.microbatches or 1
        step = sum(layer.step.median for layer in layers) / RANKS / self.microbatch_size / updates
        return {"compute at full speed": compute, "small microbatches": work - compute, "recompute": again,
                "optimizer": step, "bubble, imbalance, links": 1 / self.samples_per_s - work - again - step}


@cache
def runs(case: Case) -> Mapping[str, Run | str]:
    """Every system's best in a case, or why there is none."""
    found: dict[str, Run | str] = {}
    for system in SYSTEMS.values():
        try:
            found[system.name] = _published(system, case) if case.as_published else _best(system, case)
        except UserError as error:
            found[system.name] = error.problems[0].what
    return found


def _best(system: System, case: Case) -> Run:
    """As ``vpipe compare`` has it."""
    profiles = {count: case.profile(count) for count in microbatch_counts(BATCH)}
    plan = plan_system(system, profiles, RANKS, case.memory_bytes)
    assert plan.microbatches is not None
    for count in sorted(profiles):
        with suppress(UserError):
            plan_system(system, {count: profiles[count]}, RANKS, case.memory_bytes)
            break
    return Run(system.name, case, plan, BATCH // plan.microbatches, BATCH // count)


def _published(system: System, case: Case) -> Run:
    size = PUBLISHED_SIZES[system.name]
    every = None if RegisteredSchedule.named(system.schedule).flush else 1
    plan = solve(PlanRequest({BATCH // size: case.profile(BATCH // size)}, RANKS, case.memory_bytes, (system.schedule,),
                             {BATCH // size: every}, placement=PLACEMENT, recompute=system.recompute)).plan
    return Run(system.name, case, plan, size, None)
