"""Try candidates by simulation, look for better partitions nearby, and choose the depths of the warm-up: the forwards
of every stage before its first backward, as few as hide the transfers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from vpipe.errors import UserError
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import predict
from vpipe.plan.solver.choice import Candidate
from vpipe.plan.solver.search_space import SearchSpace
from vpipe.schedules.assignment import default_warmup

MOST_ACTIONS = 30_000
"""Actions that all trials together simulate, about; less than a second."""

OVERHEAD, PER_LAYER = 500, 3
"""Fixed cost of a simulation in actions, and its cost for each layer of the model."""

ALIKE = 1e-4
"""Plans whose seconds differ by less, relatively, are equally fast."""

SLOWER = 0.01
"""Share of the best period that is given up for fewer forwards ahead."""

GAINED = 0.001
"""Deeper warm-ups are tried as long as each gains more than this share of the period."""

MOST_ACTIONS_OF_DEPTHS = 100_000
"""Actions that are simulated for a plan, about: a few seconds. Up to 12 stages that is enough for every step."""


@dataclass
class Simulations:
    """The simulations of one request."""

    space: SearchSpace  # of the request
    left: int = MOST_ACTIONS  # actions that may still be simulated
    _results: dict[tuple[object, ...], Plan | str] = field(default_factory=dict)  # a plan, or why it cannot run

    def simulated(self, candidate: Candidate, urgent: bool = False) -> Plan | None:
        """Return a candidate's plan with predictions; None if it fails, or no actions are left and it is not urgent."""
        key = _key(candidate)
        if key not in self._results:
            profile = self.space.request.profiles[candidate.choice.microbatches]
            if self.left < self._cost(candidate) and not urgent:
                return None
            self.left -= self._cost(candidate)
            try:
                plan = candidate.plan(profile)
                self._results[key] = replace(plan, predictions=predict(profile, plan).prediction)
            except UserError as error:  # of a schedule that cannot run at this size, or with these depths
                self._results[key] = error.problems[0].what.split("\n")[0]
        result = self._results[key]
        return result if isinstance(result, Plan) else None

    def failure(self, candidate: Candidate) -> str | None:
        """Return why a simulated candidate cannot run; None when it can."""
        result = self._results.get(_key(candidate))
        return result if isinstance(result, str) else None

    def _cost(self, candidate: Candidate) -> int:
        """Return the cost of a simulation in actions."""
        return candidate.actions + OVERHEAD + PER_LAYER * self.space.request.layers

    def fitting(self, candidate: Candidate, urgent: bool = False) -> Plan | None:
        """Return the simulated plan; None also when it holds more than is allowed."""
        plan = self.simulated(candidate, urgent)
        return plan if plan is not None and self.excess(plan) <= 0 else None

    def excess(self, plan: Plan) -> float:
        """Return the bytes that a simulated plan's fullest rank holds too many."""
        limit = self.space.request.memory_bytes
        return plan.predicted.fullest_rank[1] - (math.inf if limit is None else limit)

    def best_of(self, candidates: Sequence[Candidate]) -> tuple[Candidate, Plan] | None:
        """Return the fastest, by simulation, of the candidates and their other partitions; of equals the smaller."""
        best: tuple[Candidate, Plan] | None = None
        for candidate in candidates:
            for one in (candidate, *map(candidate.with_stages, candidate.others)):
                plan = self.fitting(one, urgent=best is None)
                if plan is not None and (best is None or _preferred(plan, best[1])):
                    best = one, plan
        return best

    def improved(self, candidate: Candidate, plan: Plan) -> Plan:
        """Move a layer, or two, to neighbouring stages as long as that makes the plan faster by simulation."""
        # Half of the actions are left for others, if one more move can be tried then.
        found, least = True, max(self.left // 2, self._cost(candidate))
        while found:
            found = False
            for partition in _neighbours(candidate.partition):
                if self.left < least:
                    return plan
                if (stages := self.space.stages_of(candidate.choice, partition)) is None:
                    continue
                one = candidate.with_stages(stages)
                if (other := self.fitting(one)) is not None and seconds(other) < seconds(plan) * (1 - 1e-6):
                    candidate, plan, found = one, other, True
                    break
        return plan


def _key(candidate: Candidate) -> tuple[object, ...]:
    choice = replace(candidate.choice, update_every=None)  # which follows from the rest in one request
    return choice, candidate.partition, candidate.recomputed


def seconds(plan: Plan) -> float:
    """Return the predicted seconds per sample."""
    return plan.predicted.seconds_per_sample


def _preferred(plan: Plan, other: Plan) -> bool:
    """Tell whether a plan is faster, or equally fast and leaner."""
    if abs(seconds(plan) / seconds(other) - 1) > ALIKE:
        return seconds(plan) < seconds(other)
    return plan.predicted.fullest_rank[1] < other.predicted.fullest_rank[1]


def _neighbours(partition: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the partitions with one boundary moved by a layer, then those with two."""
    boundaries = range(len(partition) - 1)
    for moved in (*combinations(boundaries, 1), *combinations(boundaries, 2)):
        for ways in product((1, -1), repeat=len(moved)):
            sizes = list(partition)
            for stage, way in zip(moved, ways, strict=True):
                sizes[stage] += way
                sizes[stage + 1] -= way
            if min(sizes) > 0:
                yield tuple(sizes)


def deepened(trials: Simulations, plan: Plan) -> tuple[Plan, Plan | None]:
    """Return a plan with the warm-up depths that it needs, and the same with 1F1B's; None where it has no choice.

    The depths d(s) = own(s) + e(s) are the smallest that are found with which a sample takes at most 1 % longer than
    with the best, and that fit: into the memory, and, where updates limit the depth (2bw), into the plan's updates.
    """
    search = _Depths(trials, Candidate.of(plan))
    if len(plan.partition) == 1 or not search.candidate.choice.registered.any_warmup:
        return plan, None
    trials.left = MOST_ACTIONS_OF_DEPTHS
    plain = search.tried(search.steps(0), urgent=True)
    return (plan, None) if plain is None else (search.fewest(), plain)  # only the plan's own depths are known to fit


@dataclass
class _Depths:
    """The depths of one plan; ``more`` are those of every stage beyond 1F1B's."""

    trials: Simulations
    candidate: Candidate

    def steps(self, number: int) -> tuple[int, ...]:
        """Return the ``number``-th of a row of depths: so many microbatches more at stage 0, evenly fewer after it."""
        widths = self.candidate.widths
        last, more = len(widths) - 1, [0] * len(widths)
        for stage in reversed(range(last)):
            wanted = -(-number * widths[0] * (last - stage) // last)  # microbatches in flight
            wanted = max(wanted, more[stage + 1] * widths[stage + 1])
            more[stage] = -(-wanted // widths[stage])
        return tuple(more)

    def tried(self, more: tuple[int, ...], urgent: bool = False) -> Plan | None:
        """Return the plan with these depths, simulated; None where it does not fit or nothing more may be tried."""
        least = default_warmup(self.candidate.widths)
        depths = tuple(low + extra for low, extra in zip(least, more, strict=True))
        choice = replace(self.candidate.choice, warmup=depths)
        return self.trials.fitting(replace(self.candidate, choice=choice), urgent)

    def fewest(self) -> Plan:
        """Return the plan with the fewest forwards ahead whose time is near the best."""
        numbers = list(self._row())
        plans = {number: plan for number in numbers if (plan := self.tried(self.steps(number))) is not None}
        enough = (1 + SLOWER) * min(map(seconds, plans.values()))
        high = min(number for number, plan in plans.items() if seconds(plan) <= enough)
        low = max((number for number in plans if number < high), default=high)
        while high - low > 1:  # low is too slow, high is not
            middle = (low + high) // 2
            plan = self.tried(self.steps(middle))
            low, high = (low, middle) if plan is not None and seconds(plan) <= enough else (middle, high)
        return self._thinned(self.steps(high), enough)

    def _row(self) -> list[int]:
        """Return numbers of :meth:`steps` from 0 on, with which periods shrink, up to the largest that fits."""
        apart, numbers = max(1, len(self.candidate.widths) - 1), [0]
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
        stage, widths = 0, self.candidate.widths
        while stage < len(more) - 1:
            fewer = (*more[:stage], more[stage] - 1, *more[stage + 1:])
            fits = fewer[stage] * widths[stage] >= fewer[stage + 1] * widths[stage + 1]
            plan = self.tried(fewer) if more[stage] and fits else None
            if plan is not None and seconds(plan) <= enough:
                found, more, stage = plan, fewer, max(0, stage - 1)
            else:
                stage += 1
        return found
