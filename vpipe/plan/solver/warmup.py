"""Choose the forwards of every stage before its first backward: as few as hide the transfers, by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vpipe.plan.plan import Plan
from vpipe.plan.solver.candidate_trials import Simulations, seconds
from vpipe.plan.solver.choice import Candidate
from vpipe.schedules.size import default_warmup

TOLERANCE = 0.01
"""Share of the best period that is given up for fewer forwards ahead."""

GAINED = 0.001
"""Deeper warm-ups are tried as long as each gains more than this share of the period."""

MOST_ACTIONS = 100_000
"""Actions that are simulated for a plan, about: a few seconds. Up to 12 stages that is enough for every step."""


def deepened(trials: Simulations, plan: Plan) -> tuple[Plan, Plan | None]:
    """Return a plan with the warm-up depths that it needs, and the same with 1F1B's; None where it has no choice.

    The depths d(s) = own(s) + e(s) are the smallest that are found with which a sample takes at most 1 % longer than
    with the best, and that fit: into the memory, and, where updates limit the depth (2bw), into the plan's updates.
    """
    search = _Search(trials, Candidate.of(plan))
    if len(plan.partition) == 1 or not search.candidate.choice.registered.any_warmup:
        return plan, None
    trials.left = MOST_ACTIONS
    plain = search.tried(search.steps(0), urgent=True)
    return (plan, None) if plain is None else (search.fewest(), plain)  # only the plan's own depths are known to fit


@dataclass
class _Search:
    """The depths of one plan; ``more`` are those of every stage beyond 1F1B's."""

    trials: Simulations
    candidate: Candidate

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return self.candidate.widths

    def steps(self, number: int) -> tuple[int, ...]:
        """Return the ``number``-th of a row of depths: so many microbatches more at stage 0, evenly fewer after it."""
        last, more = len(self.widths) - 1, [0] * len(self.widths)
        for stage in reversed(range(last)):
            wanted = -(-number * self.widths[0] * (last - stage) // last)  # microbatches in flight
            wanted = max(wanted, more[stage + 1] * self.widths[stage + 1])
            more[stage] = -(-wanted // self.widths[stage])
        return tuple(more)

    def tried(self, more: tuple[int, ...], urgent: bool = False) -> Plan | None:
        """Return the plan with these depths, simulated; None where it does not fit or nothing more may be tried."""
        least = default_warmup(self.widths)
        depths = tuple(low + extra for low, extra in zip(least, more, strict=True))
        choice = replace(self.candidate.choice, warmup=depths)
        return self.trials.fitting(replace(self.candidate, choice=choice), urgent)

    def fewest(self) -> Plan:
        """Return the plan with the fewest forwards ahead whose time is near the best."""
        numbers = list(self._row())
        plans = {number: plan for number in numbers if (plan := self.tried(self.steps(number))) is not None}
        enough = (1 + TOLERANCE) * min(map(seconds, plans.values()))
        high = min(number for number, plan in plans.items() if seconds(plan) <= enough)
        low = max((number for number in plans if number < high), default=high)
        while high - low > 1:  # low is too slow, high is not
            middle = (low + high) // 2
            plan = self.tried(self.steps(middle))
            low, high = (low, middle) if plan is not None and seconds(plan) <= enough else (middle, high)
        return self._thinned(self.steps(high), enough)

    def _row(self) -> list[int]:
        """Return numbers of :meth:`steps` from 0 on, with which periods shrink, up to the largest that fits."""
        apart, numbers = max(1, len(self.widths) - 1), [0]
        while (plan := self.tried(self.steps(numbers[-1] + apart))) is not None:
            before = self.tried(self.steps(numbers[-1]))
            numbers.append(numbers[-1] + apart)
            if before is not None and seconds(plan) > (1 - GAINED) * seconds(before):
                return numbers
        low, high = numbers[-1], numbers[-1] + apart  # high does not fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.tried(self.steps(middle)) is None else (middle, high)
        return numbers if low == numbers[-1] else [*numbers, low]

    def _thinned(self, more: tuple[int, ...], enough: float) -> Plan:
        """Take forwards away, one by one, as long as the plan stays fast enough."""
        found = self.tried(more)
        assert found is not None, "it was simulated"
        stage = 0
        while stage < len(more) - 1:
            fewer = (*more[:stage], more[stage] - 1, *more[stage + 1:])
            fits = fewer[stage] * self.widths[stage] >= fewer[stage + 1] * self.widths[stage + 1]
            plan = self.tried(fewer) if more[stage] and fits else None
            if plan is not None and seconds(plan) <= enough:
                found, more, stage = plan, fewer, max(0, stage - 1)
            else:
                stage += 1
        return found
