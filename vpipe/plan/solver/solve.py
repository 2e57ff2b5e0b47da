"""Search the fastest plan: solve every choice by the cost model, simulate the best, compare it with other choices.

How ranks share the layers and the optimizer's state, by tensor parallelism and ZeRO-1, changes what every layer costs a
rank. So every way of sharing is a request of its own, and the fastest answer wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from vpipe.description.cut import balanced
from vpipe.errors import Problem, UserError
from vpipe.plan.plan import Plan
from vpipe.plan.solver.candidate_trials import MOST_ACTIONS, Simulations, deepened, seconds
from vpipe.plan.solver.choice import Candidate
from vpipe.plan.solver.infeasible import infeasible
from vpipe.plan.solver.partition_search import TOLERANCE, stage_ranges
from vpipe.plan.solver.request import MOST_LAYERS, MOST_RANKS, Alternative, PlanRequest
from vpipe.plan.solver.search_space import SearchSpace
from vpipe.plan.solver.stage_table import MOST_SETS
from vpipe.plan.stage_costs import taken_bytes
from vpipe.units import rounded_up, size_text

MOST_CANDIDATES = 6
"""Candidates of different choices that are simulated."""

MOST_LAYERS_OF_SETS = 12
"""In a stage of so many layers, all sets of recomputed layers are considered."""

MOST_TRIED = 3
"""Candidates that are simulated for an alternative until one fits."""

GAINED = 0.01
"""Share of the time of a sample that a way must save to be chosen before one that asks less of a run."""

Compared = tuple[Alternative, Candidate | None]
"""An alternative to a plan, with its candidate where that was simulated and fits."""


@dataclass(frozen=True)
class Solution:
    """The plan, and how it was found."""

    request: PlanRequest
    plan: Plan  # the best found, with its predictions
    alternatives: tuple[Alternative, ...]  # the next best in every respect, best first
    # by the cost model, no partition and no recomputation with the same schedule, microbatches and replicas is better
    # by more than twice the tolerance of vpipe.plan.solver.partition_search. (Simulation may have moved a few
    # layers since.) It says nothing of other schedules, microbatches and replicas.
    exact: bool
    note: str  # what was not searched exhaustively; empty when everything was
    considered: int  # choices of schedule, microbatches and replicas that were solved
    seconds: float  # that the search took
    shallow: Plan | None = None  # the plan with the warm-up depths of 1F1B, where these were chosen

    def without_recompute(self) -> tuple[int, Plan] | None:
        """Return a limit on the memory of a rank with which :func:`solve` recomputes nothing, and its plan.

        None where nothing is recomputed anyway, where the request fixes it, and where no such limit was found.
        """
        request, plan = self.request, self.plan
        if not any(plan.recomputed) or request.recompute is not None:
            return None
        space, choice = SearchSpace(replace(request, memory_bytes=None, recompute=0.0)), Candidate.of(plan).choice

        def needed() -> Iterator[int]:
            """First what the plan's own schedule and replicas need, then what the fastest of all needs."""
            if (candidate := space.solve(choice)) is not None:
                if not choice.chunked:
                    stages = stage_ranges(candidate.partition, candidate.widths)
                    yield taken_bytes(space.cost_model(choice).peak_bytes(stages), request.process_bytes,
                                      request.kept_share)
                if (simulated := Simulations(space).simulated(candidate, urgent=True)) is not None:
                    yield simulated.predicted.fullest_rank[1]
            yield _solve_one(replace(request, memory_bytes=None)).plan.predicted.fullest_rank[1]

        for least in needed():
            limit = rounded_up(least)
            found = _solve_one(replace(request, memory_bytes=limit)).plan
            if not any(found.recomputed):
                return limit, found
        return None


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
                answers[way] = _solve_one(request)
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
        if seconds(solutions[way].plan) < (1 - GAINED) * seconds(solutions[chosen].plan):
            chosen = way
    others = [alternative for way in map(Way.of, requests) if way.tensor == chosen.tensor and way != chosen
              for alternative in _of_zero1(way, solutions.get(way))]
    for tensor in sorted({*refused, *(way.tensor for way in solutions)} - {chosen.tensor}):
        found = min((each.plan for way, each in solutions.items() if way.tensor == tensor), key=seconds, default=None)
        others.append(Alternative(f"tensor {tensor}", why=_in_short(refused[tensor].problems[0]))
                      if found is None else _alternative(f"tensor {tensor}", found))
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
    return Alternative(what, plan, seconds(plan), True)


def _solve_one(request: PlanRequest) -> Solution:
    """Return the fastest plan that fits one request, by predicted time per sample.

    For every schedule, number of microbatches and number of replicas, the cost model gives the best partition and what
    to recompute in it. The best of these are simulated, and the fastest is chosen.

    Raises:
        UserError: nothing fits; it says by how much, and what would.
    """
    began = perf_counter()
    space = SearchSpace(request)
    trials = Simulations(space)
    candidates = _candidates(space)
    best = _best_of(trials, candidates)
    found = trials.best_of([*(best[:1] if best is not None else ()), *map(Candidate.of, request.known)]) or best
    if found is None:
        raise infeasible(space, _fits)
    while found is not None:  # an alternative may turn out to be faster, since the cost model is coarse
        candidate, plan = found
        if request.solver == "exact" and request.partition is None and not candidate.choice.chunked:
            plan = trials.improved(candidate, plan)
            candidate = candidate.with_stages((plan.partition, plan.recomputed))
        others = list(_alternatives(trials, candidates, candidate, plan))
        found = _faster(others, plan)
    alternatives = sorted((other for other, _ in others), key=lambda other: other.seconds_per_sample or math.inf)
    exact = (candidate.bound is not None and candidate.bound >= candidate.seconds_per_sample * (1 - 2 * TOLERANCE)
             and not _leaves_sets_out(request, candidate))
    plan, shallow = _deepened(trials, candidates, plan) if request.warmup == "auto" else (plan, None)
    return Solution(request, plan, tuple(alternatives), exact, _note(request, space, candidates, candidate),
                    space.considered, perf_counter() - began, shallow)


def _candidates(space: SearchSpace) -> list[Candidate]:
    """Return the best candidate of every choice that has one, the fastest first."""
    solve_choice = space.solve if space.request.solver == "exact" else space.solve_by_heuristic
    candidates = []
    for choice in space.choices():
        try:
            candidate = solve_choice(choice)
        except UserError as error:  # of a registered schedule that cannot be built at this size
            space.refusals[choice] = error.problems[0].what.split("\n")[0]
            continue
        if candidate is not None:
            candidates.append(candidate)
    return sorted(candidates, key=lambda candidate: candidate.seconds_per_sample)


def _best_of(trials: Simulations, candidates: Sequence[Candidate]) -> tuple[Candidate, Plan] | None:
    """Return the fastest promising candidate that fits; where none of these does, the fastest of the others.

    The best of every schedule is promising: the cost model may be less kind to one than a simulation.
    """
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.choice.schedule, candidate)
    promising = candidates[:MOST_CANDIDATES]
    return trials.best_of([*promising, *(each for each in best.values() if each not in promising)]) or \
        trials.best_of(candidates)


def _deepened(trials: Simulations, candidates: Sequence[Candidate], plan: Plan) -> tuple[Plan, Plan | None]:
    """Return a plan with the warm-up depths that it needs, and the same with 1F1B's.

    Another partition may be better once transfers are hidden: that of the cost model, which counts none of them.
    """
    chosen, shallow = deepened(trials, plan)
    first = trials.simulated(candidates[0], urgent=True) if candidates else None
    if first is not None and first.partition != plan.partition and trials.excess(first) <= 0:
        other, other_shallow = deepened(trials, first)
        if other_shallow is not None and seconds(other) < seconds(chosen):
            return other, other_shallow
    return chosen, shallow


def _fits(request: PlanRequest) -> bool:
    """Tell whether :func:`solve` finds a plan."""
    space = SearchSpace(request)
    return _best_of(Simulations(space), _candidates(space)) is not None


def _faster(others: Sequence[Compared], plan: Plan) -> tuple[Candidate, Plan] | None:
    """Return the fastest simulated alternative, if it is faster than a plan."""
    simulated = [(candidate, other.plan) for other, candidate in others if candidate is not None
                 and other.plan is not None and seconds(other.plan) < seconds(plan) * (1 - 1e-6)]
    return min(simulated, key=lambda one: seconds(one[1]), default=None)


def _alternatives(trials: Simulations, candidates: Sequence[Candidate], chosen: Candidate,
                  plan: Plan) -> Iterator[Compared]:
    """Yield the next best choice in every respect that the request leaves free."""
    space, request = trials.space, trials.space.request
    trials.left = MOST_ACTIONS
    for schedule in request.schedules:
        if schedule != chosen.choice.schedule:
            with_it = [one for one in candidates if one.choice.schedule == schedule]
            yield _best_with(trials, f"schedule {schedule}", with_it, space.why_none(schedule=schedule))
    for count in sorted(request.profiles):
        if count != chosen.choice.microbatches:
            with_it = [one for one in candidates if one.choice.microbatches == count]
            yield _best_with(trials, f"m = {count}", with_it, space.why_none(microbatches=count))
    if request.placement is None:
        replicated = [one for one in candidates if one.choice.replicated]
        if chosen.choice.replicated:
            yield _best_with(trials, "no replicas", [one for one in candidates if not one.choice.replicated],
                             space.why_none(unreplicated=True))
        elif replicated:
            yield _best_with(trials, "with replicas", replicated, "does not fit")
    if request.solver == "vpipe" or chosen.choice.chunked:
        return
    if request.recompute is None and any(chosen.recomputed):
        yield _without_recompute(trials, chosen)
    if request.partition is None and len(chosen.partition) > 1:
        weights = [layer.parameter_bytes for layer in request.profiles[chosen.choice.microbatches].layers]
        partition = tuple(balanced(weights, len(chosen.partition)))
        if partition != plan.partition:
            stages = space.stages_of(chosen.choice, partition)
            equal = [] if stages is None else [chosen.with_stages(stages)]
            yield _best_with(trials, "equal parameters", equal, "does not fit")


def _best_with(trials: Simulations, what: str, candidates: Sequence[Candidate], why: str) -> Compared:
    """Return the first of some candidates that fits, if one of the first few does; ``why``: there are none."""
    for candidate in candidates[:MOST_TRIED]:
        plan = trials.simulated(candidate)
        if (failure := trials.failure(candidate)) is not None:
            why = failure
            continue
        if plan is None:
            plan = candidate.plan(trials.space.request.profiles[candidate.choice.microbatches])
            return Alternative(what, plan, candidate.seconds_per_sample, False), None
        if (excess := trials.excess(plan)) <= 0:
            return Alternative(what, plan, seconds(plan), True), candidate
        why = f"does not fit: {size_text(excess, up=True)} too many"
    return Alternative(what, why=why), None


def _without_recompute(trials: Simulations, chosen: Candidate) -> Compared:
    space, what = SearchSpace(replace(trials.space.request, recompute=0.0)), "no recompute"
    if (candidate := space.solve(chosen.choice)) is not None:
        found = chosen.with_stages((candidate.partition, candidate.recomputed))
        return _best_with(trials, what, [found], "does not fit")
    needed = space.cost_model(chosen.choice).least_memory()
    request = space.request
    least = 0 if needed is None else taken_bytes(needed.bottleneck, request.process_bytes, request.kept_share)
    why = f"needs {size_text(least, up=True)} per rank" if least else "does not fit"
    return Alternative(what, why=why), None


def _leaves_sets_out(request: PlanRequest, chosen: Candidate) -> bool:
    """Tell whether some sets of recomputed layers of a stage may not have been considered."""
    return (request.memory_bytes is not None and any(chosen.recomputed)
            and max(chosen.partition) > MOST_LAYERS_OF_SETS)


def _note(request: PlanRequest, space: SearchSpace, candidates: Sequence[Candidate], chosen: Candidate) -> str:
    """Return what was not searched exhaustively."""
    if request.solver == "vpipe":
        return "a heuristic: layers move between neighbouring stages until no move helps"
    notes = []
    several = sorted({candidate.choice.schedule for candidate in candidates if candidate.choice.chunked})
    if several:
        notes.append(f"partitions of {', '.join(several)} (several stages on a rank) are cut to equal times, not "
                     "searched")
    if not request.small and request.placement is None and request.stages is None and request.ranks > 2:
        notes.append(f"beyond {MOST_RANKS} ranks or {MOST_LAYERS} layers all stages get equally many replicas")
    if _leaves_sets_out(request, chosen):
        notes.append(f"of the ways to recompute in a stage at most {MOST_SETS} per end are followed")
    if chosen.bound is not None and chosen.bound < chosen.seconds_per_sample * (1 - 2 * TOLERANCE):
        gap = 1 - chosen.bound / chosen.seconds_per_sample
        notes.append(f"by formula no plan with this schedule is better by more than {gap:.1%}")
    return "; ".join(notes)
