"""Choose how ranks share the layers and the optimizer's state: tensor parallelism and ZeRO-1.

Each changes what every layer costs a rank. So every way of sharing is a request of its own, and the
fastest answer wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from vpipe.errors import Problem, UserError
from vpipe.plan.plan import Plan
from vpipe.plan.solver.request import Alternative, PlanRequest
from vpipe.plan.solver.solve import Solution
from vpipe.plan.solver.solve import solve as solve_one

GAINED = 0.01
"""Share of the time of a sample that a way must save to be chosen before one that asks less of a run."""


class Way(NamedTuple):
    """How ranks share; the smaller of two asks less of a run."""

    tensor: int  # processes that split every layer
    zero1: bool  # replicas share the optimizer's state

    @classmethod
    def of(cls, request: PlanRequest) -> Way:
        """Return the way of a request's profiles."""
        profile = next(iter(request.profiles.values()))
        return cls(profile.identity.tensor, profile.zero1)


Answers = dict[Way, Solution | UserError]
"""To requests, by the way in which each shares."""


def solve(*requests: PlanRequest, answers: Answers | None = None) -> Solution:
    """Return the fastest plan of requests for the same processes, which share in different ways.

    Args:
        answers: to some of them, found before; those to the others are added.

    Raises:
        UserError: none has a plan; for every number of processes that split a layer, why.
    """
    answers = {} if answers is None else answers
    for request in requests:
        if (way := Way.of(request)) not in answers:
            try:
                answers[way] = solve_one(request)
            except UserError as error:
                answers[way] = error
    solutions = {way: answer for way, answer in sorted(answers.items()) if isinstance(answer, Solution)}
    # With zero1 a rank holds least: its figures are kept.
    refused = {way.tensor: answer for way, answer in sorted(answers.items()) if isinstance(answer, UserError)}
    if not solutions:
        if len(refused) == 1:
            raise next(iter(refused.values()))
        raise UserError.all_of([replace(problem, what=f"tensor {tensor}: {problem.what}")
                                for tensor, error in refused.items() for problem in error.problems])
    chosen, *later = solutions
    for way in later:
        if _seconds(solutions[way]) < (1 - GAINED) * _seconds(solutions[chosen]):
            chosen = way
    others = [alternative for way in map(Way.of, requests) if way.tensor == chosen.tensor and way != chosen
              for alternative in _of_zero1(way, solutions.get(way))]
    for tensor in sorted({*refused, *(way.tensor for way in solutions)} - {chosen.tensor}):
        found = min((each for way, each in solutions.items() if way.tensor == tensor), key=_seconds, default=None)
        others.append(Alternative(f"tensor {tensor}", why=_in_short(refused[tensor].problems[0]))
                      if found is None else _alternative(f"tensor {tensor}", found.plan))
    best = solutions[chosen]
    return replace(best, considered=sum(each.considered for each in solutions.values()),
                   seconds=sum(each.seconds for each in solutions.values()),
                   alternatives=tuple(sorted([*best.alternatives, *others],
                                             key=lambda other: other.seconds_per_sample or math.inf)))


def _of_zero1(way: Way, solution: Solution | None) -> Iterator[Alternative]:
    """Yield the best plan with ZeRO-1, if it has replicas that share, or without it."""
    if solution is None:
        yield Alternative("with zero1" if way.zero1 else "no zero1", why="does not fit")
    elif not way.zero1 or any(len(ranks) > 1 for ranks in solution.plan.groups):
        yield _alternative("with zero1" if way.zero1 else "no zero1", solution.plan)


def _in_short(problem: Problem) -> str:
    """Return what does not fit, and the first remedy."""
    return f"{problem.what.partition(':')[0]}; {problem.hint.partition(';')[0]}"


def _alternative(what: str, plan: Plan) -> Alternative:
    return Alternative(what, plan, plan.predicted.seconds_per_sample, True)


def _seconds(solution: Solution) -> float:
    return solution.plan.predicted.seconds_per_sample
