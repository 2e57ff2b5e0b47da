"""Nothing fits: by how much, and what would. What is said to fit was tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vpipe.errors import UserError, counted
from vpipe.plan.recompute import ranges
from vpipe.plan.solver.candidate_trials import Trials, fullest_rank
from vpipe.plan.solver.cost_model import CostModel
from vpipe.plan.solver.draft import Draft
from vpipe.plan.solver.partition_search import Cut
from vpipe.plan.solver.request import Request
from vpipe.plan.solver.schedule_model import equal_widths, refusal_of
from vpipe.plan.solver.search_space import MOST_LAYERS, MOST_RANKS, Choice, SearchSpace, chunked, plain
from vpipe.plan.stage_costs import StageMemory, combined_memory, stage_memory
from vpipe.schedules.schedule import stages_of_rank
from vpipe.sizes import parse_size, size_text

MORE = (1.0, 1.05, 1.15, 1.3, 1.6, 2.0, 3.0)
"""Limits that are tried, as multiples of what the leanest plan takes by formula, until there is a plan."""

_KINDS = {"weights": "weights", "stashed": "older weight versions", "gradients": "gradients",
          "optimizer": "optimizer state", "activations": "activations", "working": "what a backward works with"}

Fits = Callable[[Request], bool]
"""Whether the solver finds a plan for a request."""


@dataclass(frozen=True)
class _Lean:
    """The plan of a choice that holds least, or nearly.

    Attributes:
        choice: it.
        where: its fullest rank holds, for people.
        memory: of that rank.
        formula: of the choice; None where ranks hold several stages.
    """

    choice: Choice
    where: str
    memory: StageMemory
    formula: CostModel | None


def infeasible(scope: SearchSpace, fits: Fits) -> UserError:
    """What to tell who asked for a plan that there is not."""
    request, limit = scope.request, scope.request.memory_bytes
    lean = min(_leanest(scope), key=lambda one: one.memory.peak, default=None)
    if lean is None or limit is None:
        return _impossible(scope)
    memory, told = lean.memory, request.recompute is not None
    kind = max(_KINDS, key=lambda name: int(getattr(memory, name)))
    asked = "the plan asked for does not fit" if request.partition is not None and told else "no plan fits"
    if request.solver == "vpipe":
        asked = "the heuristic of the VPipe paper finds no plan that fits"
    over = memory.peak - limit
    held = f"{lean.where} holds {size_text(memory.peak, up=True)}"
    if over > 0:
        held += f", {size_text(over, up=True)} too many"
    what = (f"{asked} into {size_text(limit)} per rank: with {lean.choice.schedule} and "
            f"{counted(lean.choice.microbatches, 'microbatch')}{'' if told else ', with everything recomputed'}, "
            f"{held}; most of it, {size_text(getattr(memory, kind))}, is {_KINDS[kind]}")
    return UserError(what, hint="; or ".join(_remedies(scope, lean, fits, limit)) or
                     "allow other schedules, numbers of microbatches or ranks")


def _leanest(scope: SearchSpace) -> Iterator[_Lean]:
    """What holds least of all choices with one stage per rank, and of each of the others where that is soon known."""
    leanest: tuple[Choice, CostModel, Cut] | None = None
    choices = list(scope.choices())
    for choice in choices:
        if chunked(choice):
            continue
        formula = scope.formula(choice, scope.request.memory_bytes)
        cut = formula.least_bytes()
        if cut is None:
            continue
        if (why := scope.refusal(choice, cut)) is not None:
            scope.refusals[choice] = why
        elif leanest is None or cut.greatest < leanest[2].greatest:
            leanest = choice, formula, cut
    if leanest is not None:
        choice, formula, cut = leanest
        stage, memory, layers = _fullest(formula, cut)
        yield _Lean(choice, f"stage {stage} ({_layers(layers)})", memory, formula)
    if leanest is None or _small(scope.request):
        for choice in filter(chunked, choices):
            yield from _lean_in_chunks(scope, choice)


def _lean_in_chunks(scope: SearchSpace, choice: Choice) -> Iterator[_Lean]:
    for draft in scope.leanest_in_chunks(choice):
        plan = Trials(scope).simulated(draft, urgent=True)
        if plan is None:
            continue
        assert plan.predictions is not None
        rank, _ = fullest_rank(plan.predictions)
        stages = stages_of_rank(draft.placement, rank)
        memory = combined_memory([plan.predictions.stages[stage].memory for stage in stages])
        yield _Lean(choice, f"rank {rank} (stages {_several(draft, stages)})", memory, None)


def _several(draft: Draft, stages: Sequence[int]) -> str:
    layers = ranges(draft.partition)
    return ", ".join(f"{stage}: {_layers(layers[stage])}" for stage in stages)


def _layers(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}"


def _fullest(formula: CostModel, cut: Cut) -> tuple[int, StageMemory, range]:
    behind, found = formula.form.ranks, []
    for stage, (first, stop, width) in enumerate(cut.parts):
        hold = formula.demand(behind, width)
        told, layers = formula.spans.must(first, stop, hold), range(first, stop)
        sets = [told] if told is not None else [frozenset[int](), frozenset(layers)]
        memory = min((stage_memory(formula.spans.profile, layers, dropped, hold.in_flight, hold.versions,
                                   hold.weight_halves, formula.spans.held) for dropped in sets),
                     key=lambda memory: memory.peak)
        found.append((stage, memory, layers))
        behind -= width
    return max(found, key=lambda entry: entry[1].peak)


def _small(request: Request) -> bool:
    """Whether asking again and again does not take minutes."""
    return request.ranks <= MOST_RANKS and request.layers <= MOST_LAYERS


def _remedies(scope: SearchSpace, lean: _Lean, fits: Fits, limit: int) -> Iterator[str]:
    request, memory = scope.request, lean.memory
    if request.solver == "vpipe" and memory.peak <= limit:
        yield "choose the exact solver"
    small = _small(request)
    more = request if small else replace(request, schedules=(lean.choice.schedule,), profiles={
        lean.choice.microbatches: request.profiles[lean.choice.microbatches]})
    for factor in MORE if small else MORE[:1]:
        enough = size_text(max(factor * memory.peak, limit), up=True)
        if parse_size(enough, "the limit") > limit and fits(replace(more, memory_bytes=parse_size(enough, "it"))):
            yield f"allow {enough} or more per rank (parallel.memory, or --memory of vpipe plan)"
            break
    if small and lean.formula is not None and request.placement is None and request.partition is None and (
            request.recompute is None):
        ranks = _enough_ranks(lean.formula, lean.choice, limit)
        if ranks is not None and fits(replace(request, ranks=ranks)):
            yield f"use {ranks} ranks"
    if memory.peak - memory.activations - memory.working <= limit < memory.peak:
        samples = request.profiles[lean.choice.microbatches].identity.microbatch_size
        if samples > 1:
            yield f"use microbatches of fewer than {counted(samples, 'sample')}: activations are what is too large"
    if request.partition is not None and small and fits(replace(request, partition=None)):
        yield "leave the partition free"
    elif request.recompute is not None and small and fits(replace(request, recompute=None)):
        yield "leave free what is recomputed"


def _enough_ranks(formula: CostModel, choice: Choice, limit: int) -> int | None:
    """The fewest ranks, one per stage, with which the same schedule fits."""
    def fits(ranks: int) -> bool:
        placement = equal_widths(choice.schedule, ranks, 1)
        if refusal_of(choice.schedule, placement, choice.microbatches, None) is not None:
            return False
        form = replace(formula.form, ranks=ranks, placement=placement)
        widths = dict.fromkeys(range(1, ranks + 1), (1,))
        found = CostModel(formula.spans, form, widths, list(range(ranks))).least_bytes()
        return found is not None and found.greatest <= limit

    low, high = formula.form.ranks, 2 * formula.form.ranks
    most = formula.spans.layers
    while high < most and not fits(high):
        low, high = high, 2 * high
    high = min(high, most)
    if high <= low or not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _impossible(scope: SearchSpace) -> UserError:
    request = scope.request
    if request.solver == "vpipe" and not any(map(plain, scope.tried)):
        return UserError("the heuristic of the VPipe paper knows one stage per rank and one rank per stage only",
                         hint="choose the exact solver")
    if scope.refusals:
        return UserError(f"no schedule can be had: {'; '.join(dict.fromkeys(scope.refusals.values()))}",
                         hint="allow other schedules, numbers of microbatches or ranks")
    return UserError(f"{counted(request.ranks, 'rank')} cannot hold {counted(request.layers, 'layer')} with "
                     f"{', '.join(request.schedules)}", hint="use fewer ranks, or leave placement, partition and "
                     "recompute free")
