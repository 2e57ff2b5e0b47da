"""Nothing fits: by how much, and what would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vpipe.errors import UserError, counted
from vpipe.plan.memory import StageMemory, stage_memory
from vpipe.plan.solve.cuts import Cut
from vpipe.plan.solve.form import even, refused
from vpipe.plan.solve.formula import Formula
from vpipe.plan.solve.scope import MOST_LAYERS, MOST_RANKS, Choice, Scope, chunked
from vpipe.sizes import size_text

_KINDS = {"weights": "weights", "stashed": "older weight versions", "gradients": "gradients",
          "optimizer": "optimizer state", "activations": "activations", "working": "what a backward works with"}


def misfit(scope: Scope) -> UserError:
    """What to tell who asked for a plan that there is not."""
    request = scope.request
    leanest: tuple[Choice, Formula, Cut] | None = None
    for choice in scope.choices():
        if not chunked(choice):
            formula = scope.formula(choice, request.memory_bytes)
            cut = formula.least_bytes()
            if cut is not None and (leanest is None or cut.greatest < leanest[2].greatest):
                leanest = choice, formula, cut
    if leanest is None:
        return _impossible(scope)
    choice, formula, cut = leanest
    limit = request.memory_bytes
    if limit is None or cut.greatest <= limit:
        what = ("the heuristic of the VPipe paper finds no plan that fits" if request.solver == "vpipe" else
                f"no plan was found for {', '.join(request.schedules)}")
        return UserError(what, hint="choose the exact solver" if request.solver == "vpipe" else
                         "allow other schedules, such as 1f1b or pipedream")
    stage, memory, layers = _fullest(formula, cut)
    kind = max(_KINDS, key=lambda name: int(getattr(memory, name)))
    told = request.recompute is not None
    with_what = "" if told else ", with everything recomputed"
    asked = "the plan asked for does not fit" if request.partition is not None and told else "no plan fits"
    what = (f"{asked} into {size_text(limit)} per rank: with {choice.schedule} and "
            f"{counted(choice.microbatches, 'microbatch')}{with_what}, stage {stage} (layers {layers.start} to "
            f"{layers.stop - 1}) holds {size_text(memory.peak, up=True)}, {size_text(memory.peak - limit, up=True)} "
            f"too many; most of it, {size_text(getattr(memory, kind))}, is {_KINDS[kind]}")
    return UserError(what, hint="; or ".join(_remedies(scope, choice, formula, memory, limit)))


def _fullest(formula: Formula, cut: Cut) -> tuple[int, StageMemory, range]:
    behind, found = formula.form.ranks, []
    for stage, (first, stop, width) in enumerate(cut.parts):
        hold = formula.hold(behind, width)
        told, layers = formula.spans.must(first, stop, hold), range(first, stop)
        sets = [told] if told is not None else [frozenset[int](), frozenset(layers)]
        memory = min((stage_memory(formula.spans.profile, layers, dropped, hold.in_flight, hold.versions,
                                   hold.weight_halves, formula.spans.held) for dropped in sets),
                     key=lambda memory: memory.peak)
        found.append((stage, memory, layers))
        behind -= width
    return max(found, key=lambda entry: entry[1].peak)


def _remedies(scope: Scope, choice: Choice, formula: Formula, memory: StageMemory, limit: int) -> Iterator[str]:
    yield f"allow {size_text(memory.peak, up=True)} or more per rank"
    request = scope.request
    small = request.ranks <= MOST_RANKS and request.layers <= MOST_LAYERS  # beyond, asking would take minutes
    if small and request.placement is None and request.partition is None and request.recompute is None:
        ranks = _enough_ranks(formula, choice, limit)
        if ranks is not None:
            yield f"use {ranks} ranks"
    if memory.peak - memory.activations - memory.working <= limit:
        samples = request.profiles[choice.microbatches].identity.microbatch_size
        if samples > 1:
            yield f"use microbatches of fewer than {counted(samples, 'sample')}: activations are what is too large"
    if request.partition is not None:
        yield "leave the partition free"
    elif request.recompute is not None:
        yield "leave free what is recomputed"


def _enough_ranks(formula: Formula, choice: Choice, limit: int) -> int | None:
    """The fewest ranks, one per stage, with which the same schedule fits."""
    def fits(ranks: int) -> bool:
        placement = even(choice.schedule, ranks, 1)
        if refused(choice.schedule, placement, choice.microbatches, None) is not None:
            return False
        form = replace(formula.form, ranks=ranks, placement=placement)
        widths = dict.fromkeys(range(1, ranks + 1), (1,))
        found = Formula(formula.spans, form, widths, list(range(ranks))).least_bytes()
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


def _impossible(scope: Scope) -> UserError:
    request = scope.request
    if scope.refusals:
        return UserError(f"no schedule can be had: {'; '.join(scope.refusals)}",
                         hint="allow other schedules, numbers of microbatches or ranks")
    return UserError(f"{counted(request.ranks, 'rank')} cannot hold {counted(request.layers, 'layer')} with "
                     f"{', '.join(request.schedules)}", hint="use fewer ranks, or leave placement, partition and "
                     "recompute free")
