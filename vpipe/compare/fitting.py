"""The microbatch and the plan of each system: the best that fits in a rank's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vpipe.compare.systems import System
from vpipe.errors import UserError
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import Prediction
from vpipe.plan.profile import Profile
from vpipe.plan.solve import Request, solve
from vpipe.schedules.registry import recipe_named

MOST_SIZES = 8
"""Of microbatches that are tried, since each has to be measured: the smallest."""

SLOWER = 2
"""After so many sizes in a row that are slower than a larger one, smaller ones are not tried."""


@dataclass(frozen=True)
class Fitted:
    """How a system would run.

    Attributes:
        system: which.
        plan: of its best microbatch, with the prediction.
        microbatch_size: that, in samples.
        largest_size: the largest microbatch that fits.
        seconds_per_sample: predicted, by the microbatch sizes that were tried; None for one that does not fit.
    """

    system: System
    plan: Plan
    microbatch_size: int
    largest_size: int
    seconds_per_sample: Mapping[int, float | None]

    @property
    def prediction(self) -> Prediction:
        """Of the plan."""
        assert self.plan.predictions is not None, "the solver predicts"
        return self.plan.predictions


def microbatch_counts(batch_size: int) -> list[int]:
    """Into how many microbatches a batch may be cut, the fewest first: divisors, so that all have one size."""
    return [count for count in range(1, batch_size + 1) if batch_size % count == 0][-MOST_SIZES:]


def fit(system: System, profiles: Mapping[int, Profile], ranks: int, memory_bytes: int | None,
        solved: Callable[[], None] = lambda: None) -> Fitted:
    """The plan of a system: its best partition, of the sizes of microbatches that fit the best.

    Of the microbatches that fit it takes the one with the least predicted time per sample, the larger of equals: with a
    flush that need not be the largest, which leaves fewer of them to fill the pipeline.

    Args:
        profiles: by microbatches per update, all of equally many samples per update.
        ranks: one stage on each.
        memory_bytes: that a rank may use; None: no limit.
        solved: called whenever a size has been planned for.

    Raises:
        UserError: no size fits; says what the smallest lacks.
    """
    plans: dict[int, Plan] = {}
    seconds: dict[int, float | None] = {}
    refusal: UserError | None = None
    for count in sorted(profiles):
        try:
            plan = _solve(system, count, profiles[count], ranks, memory_bytes)
        except UserError as error:
            refusal = error  # at last, that of the smallest microbatch
            seconds[count] = None
            continue
        finally:
            solved()
        assert plan.predictions is not None, "the solver predicts"
        plans[count], seconds[count] = plan, plan.predictions.seconds_per_sample
        best = min(plans, key=lambda tried: (seconds[tried], tried))
        if list(plans).index(best) < len(plans) - SLOWER:
            break  # small microbatches are slow, and smaller ones slower
    if not plans:
        assert refusal is not None, "there are profiles"
        raise refusal
    sizes = {count: profiles[count].identity.microbatch_size for count in seconds}
    return Fitted(system, plans[best], sizes[best], sizes[min(plans)],
                  {sizes[count]: seconds[count] for count in seconds})


def _solve(system: System, count: int, profile: Profile, ranks: int, memory_bytes: int | None) -> Plan:
    every = None if recipe_named(system.schedule).flush else count  # without a flush: as many samples per update
    return solve(Request({count: profile}, ranks, memory_bytes, (system.schedule,), {count: every},
                         placement=tuple((rank,) for rank in range(ranks)), recompute=system.recompute)).plan
