"""The search: solves every choice by formula, simulates the best, and says what else there would have been."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from vpipe.errors import UserError
from vpipe.plan.activation_memory import ActivationMemory
from vpipe.plan.plan import Plan
from vpipe.plan.predict import predict
from vpipe.plan.profile import Profile, Seconds
from vpipe.plan.recompute import ranges
from vpipe.plan.solver.candidate_trials import MOST_ACTIONS, Trials, fullest_rank, seconds
from vpipe.plan.solver.draft import Draft
from vpipe.plan.solver.infeasible import infeasible
from vpipe.plan.solver.partition_search import TOLERANCE, evenly
from vpipe.plan.solver.recompute_sets import MOST_CHOICES
from vpipe.plan.solver.request import Alternative, Request, Solution
from vpipe.plan.solver.search_space import MOST_LAYERS, MOST_RANKS, Choice, SearchSpace, chunked
from vpipe.plan.stage_costs import stage_costs
from vpipe.sizes import parse_size, size_text

MOST_DRAFTS = 6
"""Choices whose best partitions are simulated."""

MOST_LAYERS_OF_SETS = 12
"""Of a stage: with as many, all ways to recompute are followed."""

MOST_TRIED = 3
"""Partitions that are simulated for an alternative until one fits."""

Compared = tuple[Alternative, Draft | None]
"""Something to compare a plan with, and the draft it came from where that was simulated and fits."""


def solve(request: Request) -> Solution:
    """The fastest plan that fits, by predicted time per sample.

    For every schedule, number of microbatches and number of replicas the best partition, and what to recompute in it,
    is found by formula (:mod:`vpipe.plan.solver.cost_model`). The best of these are simulated, and the fastest is
    chosen.

    Raises:
        UserError: nothing fits: says by how much, and what would.
    """
    began = perf_counter()
    scope = SearchSpace(request)
    trials = Trials(scope)
    drafts = _drafts(scope)
    best = _best_of(trials, drafts)
    found = trials.best_of([*(best[:1] if best is not None else ()), *_known(request)]) or best
    if found is None:
        raise infeasible(scope, _fits)
    while found is not None:  # the formula may have been unkind to what is compared with the plan
        draft, plan = found
        if request.solver == "exact" and request.partition is None and not _chunked(draft):
            plan = trials.improved(draft, plan)
            draft = replace(draft, partition=plan.partition, recomputed=plan.recomputed)
        others = list(_alternatives(trials, drafts, draft, plan))
        found = _faster(others, plan)
    alternatives = sorted((other for other, _ in others), key=lambda other: other.seconds_per_sample or math.inf)
    note = _note(request, scope, drafts, draft)
    exact = (draft.bound is not None and draft.bound >= draft.seconds_per_sample * (1 - 2 * TOLERANCE)
             and not _thinned(request, draft))
    return Solution(plan, tuple(alternatives), exact, note, scope.considered, perf_counter() - began)


def without_recompute(request: Request, solution: Solution) -> tuple[int, Plan] | None:
    """A limit on the memory of a rank with which :func:`solve` recomputes nothing, tried; and its plan.

    None where nothing is recomputed anyway, where the request says what is, and where no such limit was found.
    """
    plan = solution.plan
    if not any(plan.recomputed) or request.recompute is not None:
        return None
    assert plan.schedule is not None
    assert plan.microbatches is not None
    unlimited = replace(request, memory_bytes=None)
    scope = SearchSpace(unlimited)
    choice = Choice(plan.schedule, plan.microbatches, plan.stage_to_rank_map)

    def needed() -> Iterator[int]:
        """First what the plan's own schedule and replicas take, then what the fastest of all does."""
        draft = scope.draft(choice, share=0.0)
        if draft is not None:
            if not _chunked(draft):
                yield scope.formula(choice, None, share=0.0).peak_bytes(draft.partition, draft.widths)
            yield _peak_bytes(Trials(scope).simulated(draft, urgent=True))
        yield _peak_bytes(solve(unlimited).plan)

    for least in needed():
        limit = parse_size(size_text(least, up=True), "the limit")
        found = solve(replace(request, memory_bytes=limit)).plan
        if not any(found.recomputed):
            return limit, found
    return None


def _peak_bytes(plan: Plan | None) -> int:
    assert plan is not None
    assert plan.predictions is not None
    return fullest_rank(plan.predictions)[1]


def _drafts(scope: SearchSpace) -> list[Draft]:
    """Of every choice the best, if it can be had; the fastest first."""
    solve_choice = scope.draft if scope.request.solver == "exact" else scope.draft_of_paper
    drafts = []
    for choice in scope.choices():
        try:
            draft = solve_choice(choice)
        except UserError as error:  # a registered schedule that cannot be built or run
            scope.refusals[choice] = error.problems[0].what.split("\n")[0]
            continue
        if draft is not None:
            drafts.append(draft)
    return sorted(drafts, key=lambda draft: draft.seconds_per_sample)


def _best_of(trials: Trials, drafts: Sequence[Draft]) -> tuple[Draft, Plan] | None:
    """The fastest that fits; of the others the first that does, where none of the most promising did."""
    return trials.best_of(_varied(drafts)) or trials.best_of(drafts)


def _known(request: Request) -> Iterator[Draft]:
    """The plans that are known already."""
    for plan in request.known:
        assert plan.schedule is not None
        assert plan.microbatches is not None
        yield Draft(plan.schedule, plan.microbatches, plan.update_every, plan.stage_to_rank_map, plan.partition,
                    plan.recomputed, math.inf, None)


def _fits(request: Request) -> bool:
    """Whether :func:`solve` finds a plan."""
    scope = SearchSpace(request)
    return _best_of(Trials(scope), _drafts(scope)) is not None


def _faster(others: Sequence[Compared], plan: Plan) -> tuple[Draft, Plan] | None:
    """The fastest of what was simulated, if it is faster than a plan."""
    simulated = [(draft, other.plan) for other, draft in others
                 if draft is not None and other.simulated and other.plan is not None]
    draft, best = min(simulated, key=lambda one: seconds(one[1]), default=(None, plan))
    return (draft, best) if draft is not None and seconds(best) < seconds(plan) * (1 - 1e-6) else None


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


def _alternatives(trials: Trials, drafts: Sequence[Draft], chosen: Draft, plan: Plan) -> Iterator[Compared]:
    """The next best in every respect in which something was free."""
    scope, request = trials.scope, trials.scope.request
    trials.left = MOST_ACTIONS
    for schedule in request.schedules:
        if schedule != chosen.schedule:
            yield _best_with(trials, f"schedule {schedule}", [one for one in drafts if one.schedule == schedule],
                             scope.lacking(schedule=schedule))
    for count in sorted(request.profiles):
        if count != chosen.microbatches:
            yield _best_with(trials, f"m = {count}", [one for one in drafts if one.microbatches == count],
                             scope.lacking(microbatches=count))
    if request.placement is None:
        widest, narrow = max(chosen.widths), [one for one in drafts if max(one.widths) == 1]
        if widest > 1:
            yield _best_with(trials, "no replicas", narrow, scope.lacking(narrow=True))
        elif others := [one for one in drafts if max(one.widths) > 1]:
            yield _best_with(trials, "with replicas", others, "does not fit")
    if request.solver == "vpipe" or _chunked(chosen):
        return
    choice = Choice(chosen.schedule, chosen.microbatches, chosen.placement)
    if request.recompute is None and chosen.recomputes:
        yield _without_recompute(trials, choice, chosen)
    if request.partition is None and len(chosen.partition) > 1:
        weights = [layer.parameter_bytes for layer in request.profiles[chosen.microbatches].layers]
        partition = evenly(weights, len(chosen.partition))
        if partition != plan.partition:
            stages = scope.at(choice, partition)
            drawn = [] if stages is None else [replace(chosen, partition=stages[0], recomputed=stages[1], others=())]
            yield _best_with(trials, "equal parameters", drawn, "does not fit")


def _best_with(trials: Trials, what: str, drafts: Sequence[Draft], why: str) -> Compared:
    """The first of some drafts that holds no more than allowed, if one of the first few does.

    Args:
        why: there is none, where ``drafts`` are none.
    """
    for draft in drafts[:MOST_TRIED]:
        plan = trials.simulated(draft)
        if (failure := trials.failure(draft)) is not None:
            why = failure
            continue
        if plan is None:
            plan = draft.plan(trials.scope.request.profiles[draft.microbatches])
            return Alternative(what, plan, draft.seconds_per_sample, False), None
        if (excess := trials.excess(plan)) <= 0:
            return Alternative(what, plan, seconds(plan), True), draft
        why = f"does not fit: {size_text(excess, up=True)} too many"
    return Alternative(what, None, None, False, why), None


def _without_recompute(trials: Trials, choice: Choice, chosen: Draft) -> Compared:
    scope, what = trials.scope, "no recompute"
    draft = scope.draft(choice, share=0.0)
    if draft is not None:
        return _best_with(trials, what, [replace(chosen, partition=draft.partition, recomputed=draft.recomputed,
                                                 others=())], "does not fit")
    needed = scope.formula(choice, None, share=0.0).least_bytes()
    why = "does not fit" if needed is None else f"needs {size_text(needed.greatest, up=True)} per rank"
    return Alternative(what, None, None, False, why), None


def _thinned(request: Request, chosen: Draft) -> bool:
    """Whether some ways to recompute in a stage may not have been looked at."""
    return request.memory_bytes is not None and chosen.recomputes and max(chosen.partition) > MOST_LAYERS_OF_SETS


def _note(request: Request, scope: SearchSpace, drafts: Sequence[Draft], chosen: Draft) -> str:
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
    if _thinned(request, chosen):
        said.append(f"of the ways to recompute in a stage at most {MOST_CHOICES} per end are followed")
    if chosen.bound is not None and chosen.bound < chosen.seconds_per_sample * (1 - 2 * TOLERANCE):
        gap = 1 - chosen.bound / chosen.seconds_per_sample
        said.append(f"by formula no plan with this schedule is better by more than {gap:.1%}")
    return "; ".join(said)


_TIMES = ("forward", "backward", "input_half", "weight_half", "recompute")


def better_partition(request: Request, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                     measured_stage_s: Sequence[float]) -> tuple[Plan | None, float]:
    """The plan with another partition that is faster by a run's own figures and fits, and how much faster a step gets.

    A stage that took longer than the profile says makes each of its layers longer by the same factor. Both partitions
    are simulated, so where ranks share cores a partition is not better for being even.

    Args:
        request: of the run: one profile, one schedule, its placement.
        partition: layers per stage, now.
        recomputed: per stage the layers that are recomputed, now.
        measured_stage_s: per stage, forward, backward and recomputation of one microbatch.

    Returns:
        The plan, None when the partition there is cannot be bettered; and the share of the time of a step that it
        saves.
    """
    [(microbatches, profile)], [schedule] = request.profiles.items(), request.schedules
    scaled = _scaled(profile, partition, recomputed, measured_stage_s)
    now = Plan(tuple(partition), stage_to_rank_map=request.placement or (), schedule=schedule,
               recompute_layers=tuple(tuple(sorted(own)) for own in recomputed), microbatches=microbatches,
               update_every=request.update_every.get(microbatches))
    try:
        found = solve(replace(request, profiles={microbatches: scaled}, partition=None)).plan
    except UserError:  # nothing fits, by the solver's count
        return None, 0.0
    assert found.predictions is not None, "a solution's plan has them"
    gain = 1 - found.predictions.step_s / predict(scaled, now).prediction.step_s
    return (found, gain) if gain > 0 and found.partition != now.partition else (None, 0.0)


def _scaled(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
            measured_stage_s: Sequence[float]) -> Profile:
    """The profile with the layers of each stage as fast as that was. Ranks that share cores measure each other's work,
    too: then only how the stages differ counts, not how long they take."""
    held, expected = ActivationMemory(profile), []
    for layers, again in zip(ranges(partition), recomputed, strict=True):
        cost = stage_costs(profile, layers, again, held=held)
        expected.append(float(cost.forward_s + cost.input_s + cost.weight_s + cost.recompute_s))
    shared = profile.cores is not None and profile.identity.ranks_per_host > profile.cores
    all_alike = sum(measured_stage_s) / sum(expected) if shared else 1.0
    made = list(profile.layers)
    for layers, own, measured in zip(ranges(partition), expected, measured_stage_s, strict=True):
        factor = measured / own / all_alike
        for number in layers:
            slowed: dict[str, Any] = {figure: Seconds(factor * seconds.median, seconds.spread) for figure in _TIMES
                                      for seconds in [getattr(made[number], figure)]}
            made[number] = replace(made[number], **slowed)
    return replace(profile, layers=tuple(made))
