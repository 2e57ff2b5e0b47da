"""Explain that no plan fits: what is too large, by how much, and which changes would help. These are tried first."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

from vpipe.description.cut import ranges
from vpipe.errors import UserError, counted
from vpipe.plan.plan import Plan
from vpipe.plan.solver.candidate_trials import Simulations
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.search_space import SearchSpace
from vpipe.schedules.assignment import stages_of_rank
from vpipe.units import rounded_up, size_text

MORE = (1.0, 1.05, 1.15, 1.3, 1.6, 2.0, 3.0)
"""Limits that are tried, as multiples of the least that was found, until there is a plan."""

_KINDS = {"weights": "weights", "stashed": "older weight versions", "gradients": "gradients",
          "optimizer": "optimizer state", "activations": "activations", "working": "what a backward works with",
          "kept": "what the allocator keeps of tensors that are gone", "process": "Python, torch and the data"}

_OTHERS = "allow other schedules, numbers of microbatches or ranks"


def infeasible(space: SearchSpace, fits: Callable[[PlanRequest], bool]) -> UserError:
    """Return the error for a request that has no plan; ``fits`` tells whether the solver finds one for another."""
    request, limit = space.request, space.request.memory_bytes
    plan = min(_smallest(space), key=lambda plan: plan.predicted.fullest_rank[1], default=None)
    if plan is None or limit is None:
        return _impossible(space)
    rank, peak = plan.predicted.fullest_rank
    stages, layers = stages_of_rank(plan.groups, rank), list(map(_layers, ranges(plan.partition)))
    place = f"stage {stages[0]} ({layers[stages[0]]})" if len(stages) == 1 else (
        f"rank {rank} (stages {', '.join(f'{stage}: {layers[stage]}' for stage in stages)})")
    memory, fixed = plan.predicted.held_by(stages), request.recompute is not None
    held = {**vars(memory), "process": plan.predicted.process_bytes,
            "kept": math.floor(plan.predicted.kept_share * memory.peak)}
    kind = max(_KINDS, key=lambda name: held[name])
    asked = "the plan asked for does not fit" if request.partition is not None and fixed else "no plan fits"
    if request.solver == "vpipe":
        asked = "the heuristic of the VPipe paper finds no plan that fits"
    excess = f", {size_text(peak - limit, up=True)} too many" if peak > limit else ""
    what = (f"{asked} into {size_text(limit)} per rank: with {plan.schedule} and "
            f"{counted(plan.microbatches or 0, 'microbatch')}{'' if fixed else ', with everything recomputed'}, "
            f"{place} holds {size_text(peak, up=True)}{excess}; most of it, {size_text(held[kind])}, is "
            f"{_KINDS[kind]}")
    return UserError(what, hint="; or ".join(_remedies(request, plan, peak, limit, fits)) or _OTHERS)


def _smallest(space: SearchSpace) -> Iterator[Plan]:
    """Yield the plan of least memory of all unchunked choices, and of each chunked one where that takes no minutes."""
    choices = list(space.choices())
    found = [one for choice in choices if not choice.chunked and (one := space.of_least_memory(choice)) is not None]
    candidates = [candidate for _, candidate in sorted(found, key=lambda one: one[0])[:1]]
    if not candidates or space.request.small:
        candidates += [one for choice in choices if choice.chunked for one in space.chunked_of_least_memory(choice)]
    simulations = Simulations(space)
    return filter(None, (simulations.simulated(candidate, urgent=True) for candidate in candidates))


def _layers(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"


def _remedies(request: PlanRequest, plan: Plan, peak: int, limit: int,
              fits: Callable[[PlanRequest], bool]) -> Iterator[str]:
    """Yield more memory, more ranks, and the optimizer's state shared by replicas, where a plan then fits."""
    assert plan.schedule is not None
    assert plan.microbatches is not None
    profile = request.profiles[plan.microbatches]
    alike = replace(request, schedules=(plan.schedule,), profiles={plan.microbatches: profile})
    for factor in MORE if request.small else MORE[:1]:
        enough = rounded_up(max(factor * peak, limit))
        if enough > limit and fits(replace(alike, memory_bytes=enough)):
            yield f"allow {size_text(enough)} or more per rank (parallel.memory, --memory, memory_bytes in Python)"
            break
    free = all(each is None for each in (request.placement, request.stages, request.partition, request.recompute))
    if free and request.small:
        more = range(request.ranks + 1, request.layers + 1)
        enough_ranks = bisect_left(more, True, key=lambda ranks: fits(replace(alike, ranks=ranks)))
        if enough_ranks < len(more):
            yield f"use {more[enough_ranks] * profile.identity.tensor} ranks"
    if not profile.zero1 and request.small and fits(request.with_zero1):
        yield "let replicas share the optimizer's state (parallel.zero1: true)"


def _impossible(space: SearchSpace) -> UserError:
    request = space.request
    if request.solver == "vpipe" and not any(choice.plain for choice in space.tried):
        return UserError("the heuristic of the VPipe paper knows one stage per rank and one rank per stage only",
                         hint="choose the exact solver")
    if space.refusals:
        return UserError(f"no schedule can be had: {'; '.join(dict.fromkeys(space.refusals.values()))}", hint=_OTHERS)
    if request.stages is not None:
        return UserError(f"no schedule has {counted(request.stages, 'stage')} on {counted(request.ranks, 'rank')} "
                         f"(tried: {', '.join(request.schedules)})", hint="leave the number of stages free "
                         f"(no --stages, no stages=), or plan for {counted(request.stages, 'rank')}")
    return UserError(f"{counted(request.ranks, 'rank')} cannot hold {counted(request.layers, 'layer')} with "
                     f"{', '.join(request.schedules)}", hint="use fewer ranks, or leave placement, partition and "
                     "recompute free")
