"""Try candidates by simulation, and look for better partitions nearby."""

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

MOST_ACTIONS = 30_000
"""Actions that all trials together simulate, about; less than a second."""

OVERHEAD, PER_LAYER = 500, 3
"""Fixed cost of a simulation in actions, and its cost for each layer of the model."""

ALIKE = 1e-4
"""Plans whose seconds differ by less, relatively, are equally fast."""


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
    choice = candidate.choice
    return (choice.schedule, choice.microbatches, choice.slices, choice.placement, choice.warmup, candidate.partition,
            candidate.recomputed)


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
