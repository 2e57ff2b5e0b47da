"""The search: solves every choice by formula, simulates the best, and says what else there would have been."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from vpipe.plan.plan import Plan
from vpipe.plan.solve.cuts import TOLERANCE, evenly
from vpipe.plan.solve.draft import Draft
from vpipe.plan.solve.misfit import misfit
from vpipe.plan.solve.request import Alternative, Request, Solution
from vpipe.plan.solve.scope import MOST_LAYERS, MOST_RANKS, Choice, Scope, chunked
from vpipe.plan.solve.sets import MOST_CHOICES
from vpipe.plan.solve.trials import MOST_ACTIONS, Trials, fullest_rank, seconds
from vpipe.sizes import size_text

MOST_DRAFTS = 6
"""Choices whose best partitions are simulated."""

MOST_TRIED = 3
"""Partitions that are simulated for an alternative until one fits."""


def solve(request: Request) -> Solution:
    """The fastest plan that fits, by predicted time per sample.

    For every schedule, number of microbatches and number of replicas the best partition, and what to recompute in it,
    is found by formula (:mod:`vpipe.plan.solve.formula`); the best of these are simulated, and the fastest is chosen.

    Raises:
        UserError: nothing fits: says by how much, and what would.
    """
    began = perf_counter()
    scope = Scope(request)
    trials = Trials(scope)
    solved = scope.draft if request.solver == "exact" else scope.draft_of_paper
    drafts = [draft for choice in scope.choices() if (draft := solved(choice)) is not None]
    drafts.sort(key=lambda draft: draft.seconds_per_sample)
    best = trials.best_of(_varied(drafts))
    if best is None:
        raise misfit(scope)
    draft, plan = best
    if request.solver == "exact" and request.partition is None and not _chunked(draft):
        plan = trials.improved(draft, plan)
        draft = replace(draft, partition=plan.partition, recomputed=plan.recomputed)
    alternatives = sorted(_alternatives(trials, drafts, draft, plan),
                          key=lambda other: other.seconds_per_sample or math.inf)
    note = _note(request, scope, drafts, draft)
    exact = draft.bound is not None and draft.bound >= draft.seconds_per_sample * (1 - 2 * TOLERANCE)
    return Solution(plan, tuple(alternatives), exact, note, scope.considered, perf_counter() - began,
                    _limit_without(trials, draft, plan))


def _varied(drafts: Sequence[Draft]) -> list[Draft]:
    """The best, and the best of every schedule: a formula may be less kind to one than a simulation."""
    chosen = list(drafts[:MOST_DRAFTS])
    for schedule in dict.fromkeys(draft.schedule for draft in drafts):
        first = next(draft for draft in drafts if draft.schedule == schedule)
        if first not in chosen:
            chosen.append(first)
    return chosen


def _chunked(draft: Draft) -> bool:
    return chunked(Choice(draft.schedule, draft.microbatches, draft.placement))


def _alternatives(trials: Trials, drafts: Sequence[Draft], chosen: Draft, plan: Plan) -> Iterator[Alternative]:
    """The next best in every respect in which something was free."""
    scope, request = trials.scope, trials.scope.request
    trials.left = MOST_ACTIONS
    for schedule in request.schedules:
        if schedule != chosen.schedule:
            yield _best_with(trials, f"schedule {schedule}", [one for one in drafts if one.schedule == schedule])
    for count in sorted(request.profiles):
        if count != chosen.microbatches:
            yield _best_with(trials, f"m = {count}", [one for one in drafts if one.microbatches == count])
    if request.placement is None:
        widest, narrow = max(chosen.widths), [one for one in drafts if max(one.widths) == 1]
        if widest > 1:
            yield _best_with(trials, "no replicas", narrow)
        elif others := [one for one in drafts if max(one.widths) > 1]:
            yield _best_with(trials, "with replicas", others)
    if request.solver == "vpipe" or _chunked(chosen):
        return
    choice = Choice(chosen.schedule, chosen.microbatches, chosen.placement)
    if request.recompute is None and chosen.recomputes:
        yield _without_recompute(trials, choice)
    if request.partition is None and len(chosen.partition) > 1:
        weights = [layer.parameter_bytes for layer in request.profiles[chosen.microbatches].layers]
        partition = evenly(weights, len(chosen.partition))
        if partition != plan.partition:
            stages = scope.at(choice, partition)
            drawn = [] if stages is None else [replace(chosen, partition=stages[0], recomputed=stages[1], others=())]
            yield _best_with(trials, "equal parameters", drawn)


def _best_with(trials: Trials, what: str, drafts: Sequence[Draft]) -> Alternative:
    """The first of some drafts that holds no more than allowed, if one of the first few does."""
    why = "does not fit" if trials.scope.request.memory_bytes is not None else next(
        iter(trials.scope.refusals), "cannot be had")
    for draft in drafts[:MOST_TRIED]:
        plan = trials.simulated(draft)
        if plan is None:
            plan = draft.plan(trials.scope.request.profiles[draft.microbatches])
            return Alternative(what, plan, draft.seconds_per_sample, False)
        if (excess := trials.excess(plan)) <= 0:
            return Alternative(what, plan, seconds(plan), True)
        why = f"does not fit: {size_text(excess, up=True)} too many"
    return Alternative(what, None, None, False, why)


def _without_recompute(trials: Trials, choice: Choice) -> Alternative:
    scope, what = trials.scope, "no recompute"
    draft = scope.draft(choice, share=0.0)
    if draft is not None:
        return _best_with(trials, what, [draft])
    needed = scope.formula(choice, None, share=0.0).least_bytes()
    why = "does not fit" if needed is None else f"needs {size_text(needed.greatest, up=True)} per rank"
    return Alternative(what, None, None, False, why)


def _limit_without(trials: Trials, chosen: Draft, plan: Plan) -> int | None:
    """The memory that the best plan takes whose ranks may hold anything and recompute nothing."""
    if not chosen.recomputes or trials.scope.request.recompute is not None:
        return None
    choice = Choice(chosen.schedule, chosen.microbatches, chosen.placement)
    draft = trials.scope.draft(choice, share=0.0, limited=False)
    if draft is None:
        return None
    if _chunked(draft):
        unlimited = trials.simulated(draft, urgent=True)
        assert unlimited is not None
        assert unlimited.predictions is not None
        return fullest_rank(unlimited.predictions)[1]
    return trials.scope.formula(choice, None, share=0.0).peak_bytes(draft.partition, draft.widths)


def _note(request: Request, scope: Scope, drafts: Sequence[Draft], chosen: Draft) -> str:
    """What was not searched exhaustively."""
    if request.solver == "vpipe":
        return "a heuristic: layers move between neighbouring stages until no move helps"
    said = []
    several = sorted({draft.schedule for draft in drafts if _chunked(draft)})
    if several:
        said.append(f"partitions of {', '.join(several)} (several stages on a rank) are cut to equal times, not "
                    "searched")
    wide = request.placement is None and request.ranks > 2
    if wide and not scope.searches_widths and (request.ranks > MOST_RANKS or request.layers > MOST_LAYERS):
        said.append(f"beyond {MOST_RANKS} ranks or {MOST_LAYERS} layers all stages get equally many replicas")
    if request.memory_bytes is not None and chosen.recomputes and max(chosen.partition) > 12:
        said.append(f"of the ways to recompute in a stage at most {MOST_CHOICES} per end are followed")
    if chosen.bound is not None and chosen.bound < chosen.seconds_per_sample * (1 - 2 * TOLERANCE):
        gap = 1 - chosen.bound / chosen.seconds_per_sample
        said.append(f"by formula no plan with this schedule is better by more than {gap:.1%}")
    return "; ".join(said)
