"""Explain that no plan fits: what is too large, by how much, and which changes would help. These are tried first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from vpipe.description.recompute import ranges
from vpipe.errors import UserError, counted
from vpipe.plan.solver.candidate_trials import Simulations
from vpipe.plan.solver.choice import Choice, equal_widths
from vpipe.plan.solver.cost_model import CostModel
from vpipe.plan.solver.partition_search import FoundPartition
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.search_space import MOST_LAYERS, MOST_RANKS, SearchSpace
from vpipe.plan.stage_costs import StageMemory, combined_memory, stage_memory
from vpipe.schedules.assignment import stages_of_rank
from vpipe.units import parse_size, size_text

MORE = (1.0, 1.05, 1.15, 1.3, 1.6, 2.0, 3.0)
"""Limits that are tried, as multiples of the least that the cost model finds, until there is a plan."""

_KINDS = {"weights": "weights", "stashed": "older weight versions", "gradients": "gradients",
          "optimizer": "optimizer state", "activations": "activations", "working": "what a backward works with"}

_OTHERS = "allow other schedules, numbers of microbatches or ranks"

Fits = Callable[[PlanRequest], bool]
"""Tells whether the solver finds a plan for a request."""


@dataclass(frozen=True)
class _LeastMemory:
    """The plan of a choice that holds least, or nearly."""

    choice: Choice
    place: str  # of its fullest rank, for messages
    memory: StageMemory  # of that rank
    costs: CostModel | None = None  # of the choice; None where ranks hold several stages


def infeasible(space: SearchSpace, fits: Fits) -> UserError:
    """Return the error for a request that has no plan."""
    request, limit = space.request, space.request.memory_bytes
    smallest = min(_least_memory(space), key=lambda one: one.memory.peak, default=None)
    if smallest is None or limit is None:
        return _impossible(space)
    memory, fixed = smallest.memory, request.recompute is not None
    kind = max(_KINDS, key=lambda name: int(getattr(memory, name)))
    asked = "the plan asked for does not fit" if request.partition is not None and fixed else "no plan fits"
    if request.solver == "vpipe":
        asked = "the heuristic of the VPipe paper finds no plan that fits"
    excess = f", {size_text(memory.peak - limit, up=True)} too many" if memory.peak > limit else ""
    what = (f"{asked} into {size_text(limit)} per rank: with {smallest.choice.schedule} and "
            f"{counted(smallest.choice.microbatches, 'microbatch')}{'' if fixed else ', with everything recomputed'}, "
            f"{smallest.place} holds {size_text(memory.peak, up=True)}{excess}; most of it, "
            f"{size_text(getattr(memory, kind))}, is {_KINDS[kind]}")
    return UserError(what, hint="; or ".join(_remedies(space, smallest, fits, limit)) or _OTHERS)


def _least_memory(space: SearchSpace) -> Iterator[_LeastMemory]:
    """Yield the plan of least memory of all unchunked choices, and of each chunked one where that takes no minutes."""
    smallest: tuple[Choice, CostModel, FoundPartition] | None = None
    choices = list(space.choices())
    for choice in (one for one in choices if not one.chunked):
        costs = space.cost_model(choice, space.request.memory_bytes)
        if (found := costs.least_memory()) is None:
            continue
        if (why := choice.with_widths(found.widths).refusal) is not None:
            space.refusals[choice] = why
        elif smallest is None or found.bottleneck < smallest[2].bottleneck:
            smallest = choice, costs, found
    if smallest is not None:
        choice, costs, found = smallest
        stage, memory, layers = _fullest_stage(costs, found)
        yield _LeastMemory(choice, f"stage {stage} ({_layers(layers)})", memory, costs)
    chunked = [choice for choice in choices if choice.chunked] if smallest is None or _small(space.request) else []
    for candidate in (one for choice in chunked for one in space.chunked_of_least_memory(choice)):
        if (plan := Simulations(space).simulated(candidate, urgent=True)) is not None:
            rank, _ = plan.predicted.fullest_rank
            stages, layers_of = stages_of_rank(candidate.choice.groups, rank), ranges(candidate.partition)
            place = ", ".join(f"{stage}: {_layers(layers_of[stage])}" for stage in stages)
            yield _LeastMemory(candidate.choice, f"rank {rank} (stages {place})",
                           combined_memory([plan.predicted.stages[stage].memory for stage in stages]))


def _layers(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"


def _fullest_stage(costs: CostModel, found: FoundPartition) -> tuple[int, StageMemory, range]:
    stages = []
    for stage, ((first, stop, _), demand) in enumerate(costs.demands(found.slices)):
        required, layers = costs.table.required(first, stop, demand), range(first, stop)
        sets = [required] if required is not None else [frozenset[int](), frozenset(layers)]
        memory = min((stage_memory(costs.table.profile, layers, recomputed, demand.in_flight, demand.versions,
                                   demand.weight_halves) for recomputed in sets), key=lambda memory: memory.peak)
        stages.append((stage, memory, layers))
    return max(stages, key=lambda entry: entry[1].peak)


def _small(request: PlanRequest) -> bool:
    """Tell whether the solver can be asked again and again without taking minutes."""
    return request.ranks <= MOST_RANKS and request.layers <= MOST_LAYERS


def _remedies(space: SearchSpace, smallest: _LeastMemory, fits: Fits, limit: int) -> Iterator[str]:
    request, memory, choice = space.request, smallest.memory, smallest.choice
    if request.solver == "vpipe" and memory.peak <= limit:
        yield "choose the exact solver"
    small = _small(request)
    more = request if small else replace(request, schedules=(choice.schedule,), profiles={
        choice.microbatches: request.profiles[choice.microbatches]})
    for factor in MORE if small else MORE[:1]:
        enough = size_text(max(factor * memory.peak, limit), up=True)
        if parse_size(enough, "the limit") > limit and fits(replace(more, memory_bytes=parse_size(enough, "it"))):
            yield f"allow {enough} or more per rank (parallel.memory, or --memory of vpipe plan)"
            break
    free = all(each is None for each in (request.placement, request.stages, request.partition, request.recompute))
    if small and smallest.costs is not None and free:
        ranks = _enough_ranks(smallest.costs, choice, limit)
        if ranks is not None and fits(replace(request, ranks=ranks)):
            yield f"use {ranks} ranks"
    if memory.peak - memory.activations - memory.working <= limit < memory.peak:
        samples = request.profiles[choice.microbatches].identity.microbatch_size
        if samples > 1:
            yield f"use microbatches of fewer than {counted(samples, 'sample')}: activations are what is too large"
    if request.partition is not None and small and fits(replace(request, partition=None)):
        yield "leave the partition free"
    elif request.recompute is not None and small and fits(replace(request, recompute=None)):
        yield "leave free what is recomputed"
    if request.stages is not None and small and fits(replace(request, stages=None)):
        yield "leave the number of stages free (no --stages)"


def _enough_ranks(costs: CostModel, choice: Choice, limit: int) -> int | None:
    """Return the fewest ranks, one per stage, with which the same schedule fits; None when no number does."""
    def fits(ranks: int) -> bool:
        wider = replace(choice, ranks=ranks, placement=equal_widths(choice.schedule, ranks, 1))
        if wider.refusal is not None:
            return False
        found = CostModel(costs.table, wider).least_memory()
        return found is not None and found.bottleneck <= limit

    most, enough = costs.table.layers, 2 * choice.ranks
    while enough < most and not fits(enough):
        enough *= 2
    tried = range(enough // 2 + 1, min(enough, most) + 1)
    found = bisect_left(tried, True, key=fits)
    return tried[found] if found < len(tried) else None


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
                         f"(no --stages), or plan for {counted(request.stages, 'rank')}")
    return UserError(f"{counted(request.ranks, 'rank')} cannot hold {counted(request.layers, 'layer')} with "
                     f"{', '.join(request.schedules)}", hint="use fewer ranks, or leave placement, partition and "
                     "recompute free")
