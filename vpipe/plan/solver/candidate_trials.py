"""Drafts put to the test: simulated, and better neighbours looked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from vpipe.errors import UserError
from vpipe.plan.plan import Plan, Prediction
from vpipe.plan.predict import predict
from vpipe.plan.solver.draft import Draft
from vpipe.plan.solver.search_space import Choice, SearchSpace
from vpipe.plan.stage_costs import StageMemory, combined_memory

MOST_ACTIONS = 30_000
"""Simulated for all trials together, about; less than a second."""

OVERHEAD = 500
"""What a simulation costs beside its actions, in actions; and :data:`PER_LAYER` for each of the model's."""

PER_LAYER = 3

ALIKE = 1e-4
"""Plans whose seconds differ by less, relatively, are as fast."""


@dataclass
class Trials:
    """Simulations of one request.

    Attributes:
        scope: the request's.
        left: actions that may still be simulated.
    """

    scope: SearchSpace
    left: int = MOST_ACTIONS
    _known: dict[tuple[object, ...], Plan | str] = field(default_factory=dict)  # a plan, or why it cannot run

    def simulated(self, draft: Draft, urgent: bool = False) -> Plan | None:
        """Return the plan of a draft with its predictions; None when too much was simulated already, or on a failure.

        Args:
            urgent: simulate it however much was simulated.
        """
        key = _key(draft)
        if key not in self._known:
            profile = self.scope.request.profiles[draft.microbatches]
            if self.left < self._cost(draft) and not urgent:
                return None
            self.left -= self._cost(draft)
            plan = draft.plan(profile)
            try:
                self._known[key] = replace(plan, predictions=predict(profile, plan).prediction)
            except UserError as error:  # of a registered schedule that cannot run at this size
                self._known[key] = error.problems[0].what.split("\n")[0]
        known = self._known[key]
        return known if isinstance(known, Plan) else None

    def failure(self, draft: Draft) -> str | None:
        """Return why a simulated draft cannot run; None when it can."""
        known = self._known.get(_key(draft))
        return known if isinstance(known, str) else None

    def _cost(self, draft: Draft) -> int:
        """Of a simulation, in actions."""
        return draft.actions + OVERHEAD + PER_LAYER * self.scope.request.layers

    def tried(self, draft: Draft, urgent: bool = False) -> Plan | None:
        """The same; also None when the plan holds more than is allowed."""
        plan = self.simulated(draft, urgent)
        return plan if plan is not None and self.excess(plan) <= 0 else None

    def excess(self, plan: Plan) -> float:
        """The bytes that a simulated plan's fullest rank holds too many."""
        limit = self.scope.request.memory_bytes
        assert plan.predictions is not None
        return fullest_rank(plan.predictions)[1] - (math.inf if limit is None else limit)

    def best_of(self, drafts: Sequence[Draft]) -> tuple[Draft, Plan] | None:
        """The fastest by simulation, of the drafts and of the other partitions found with them; of equally fast ones
        that which holds least."""
        best: tuple[Draft, Plan] | None = None
        for draft in drafts:
            for one in (draft, *(replace(draft, partition=partition, recomputed=recomputed)
                                 for partition, recomputed in draft.others)):
                plan = self.tried(one, urgent=best is None)
                if plan is not None and (best is None or _preferred(plan, best[1])):
                    best = one, plan
        return best

    def improved(self, draft: Draft, plan: Plan) -> Plan:
        """The plan after as many moves of a layer to a neighbouring stage, or two, as make it faster by simulation."""
        choice = Choice(draft.schedule, draft.microbatches, draft.placement)
        found, least = True, max(self.left // 2, self._cost(draft))  # what is left for others, if one more is possible
        while found:
            found = False
            for partition in _neighbours(draft.partition):
                if self.left < least:
                    return plan
                if (stages := self.scope.at(choice, partition)) is None:
                    continue
                one = replace(draft, partition=stages[0], recomputed=stages[1])
                if (other := self.tried(one)) is not None and seconds(other) < seconds(plan) * (1 - 1e-6):
                    draft, plan, found = one, other, True
                    break
        return plan


def _key(draft: Draft) -> tuple[object, ...]:
    return draft.schedule, draft.microbatches, draft.placement, draft.partition, draft.recomputed


def seconds(plan: Plan) -> float:
    """Per sample, predicted."""
    assert plan.predictions is not None
    return plan.predictions.seconds_per_sample


def _preferred(plan: Plan, other: Plan) -> bool:
    """Whether a plan is faster, or as fast and holds less."""
    if abs(seconds(plan) / seconds(other) - 1) > ALIKE:
        return seconds(plan) < seconds(other)
    assert plan.predictions is not None
    assert other.predictions is not None
    return fullest_rank(plan.predictions)[1] < fullest_rank(other.predictions)[1]


def fullest_rank(prediction: Prediction) -> tuple[int, int]:
    """The rank that holds most, and the bytes."""
    held: dict[int, list[StageMemory]] = {}
    for stage in prediction.stages:
        for rank in stage.ranks:
            held.setdefault(rank, []).append(stage.memory)
    return max(((rank, combined_memory(stages).peak) for rank, stages in held.items()), key=lambda item: item[1])


def _neighbours(partition: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One boundary moved by a layer, then two."""
    boundaries = range(len(partition) - 1)
    for moved in (*combinations(boundaries, 1), *combinations(boundaries, 2)):
        for ways in product((1, -1), repeat=len(moved)):
            sizes = list(partition)
            for stage, way in zip(moved, ways, strict=True):
                sizes[stage] += way
                sizes[stage + 1] -= way
            if min(sizes) > 0:
                yield tuple(sizes)
