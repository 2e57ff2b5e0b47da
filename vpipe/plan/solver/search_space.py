"""The choices of a request: every schedule, number of microbatches and width that may be, each solved by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vpipe.plan.recompute import recomputed_layers
from vpipe.plan.solver.chunked_partition import cut_in_chunks
from vpipe.plan.solver.cost_model import CostModel
from vpipe.plan.solver.draft import Draft
from vpipe.plan.solver.partition_search import Cut, StageSlice
from vpipe.plan.solver.request import Request
from vpipe.plan.solver.schedule_model import ScheduleModel, equal_widths, placement_of_widths, refusal_of, traits_of
from vpipe.plan.solver.stage_table import StageTable
from vpipe.plan.solver.vpipe_heuristic import balanced
from vpipe.schedules.registry import recipe_named
from vpipe.schedules.size import Placement

MOST_RANKS, MOST_LAYERS = 16, 200
"""Unequal widths are searched up to so many of each; beyond, all stages have equally many replicas."""


MOST_OTHERS = 2
"""Further partitions of a choice that may be simulated."""


@dataclass(frozen=True)
class Choice:
    """What is fixed while a partition is searched.

    Attributes:
        placement: ranks per stage; None where every stage may have any number of replicas.
    """

    schedule: str
    microbatches: int
    placement: Placement | None


@dataclass
class SearchSpace:
    """A request, and what was found for its choices.

    Attributes:
        request: it.
        tried: all choices there were so far.
        refusals: why some of them cannot be had, whatever the memory.
        considered: how many choices were solved.
    """

    request: Request
    tried: dict[Choice, None] = field(default_factory=dict)
    refusals: dict[Choice, str] = field(default_factory=dict)
    considered: int = 0
    _spans: dict[tuple[int, int | None, bool], StageTable] = field(default_factory=dict)

    def choices(self, schedules: Sequence[str] | None = None,
                microbatches: Sequence[int] | None = None) -> Iterator[Choice]:
        """All of them, or those with certain schedules and numbers of microbatches."""
        for schedule in schedules or self.request.schedules:
            for count in microbatches or sorted(self.request.profiles):
                for choice in self._choices(schedule, count):
                    self.tried[choice] = None
                    why = traits_of(recipe_named(schedule)).problem or None
                    if why is None and choice.placement is not None:
                        why = refusal_of(schedule, choice.placement, count, self._every(schedule, count))
                    if why is None:
                        yield choice
                    else:
                        self.refusals[choice] = why

    def lacking(self, schedule: str | None = None, microbatches: int | None = None, narrow: bool = False) -> str:
        """Why none of the choices with a schedule, a number of microbatches, or without replicas gave a plan."""
        tried = [choice for choice in self.tried if schedule in (None, choice.schedule)
                 and microbatches in (None, choice.microbatches) and (not narrow or not _wide(choice))]
        possible = [choice for choice in tried if choice not in self.refusals]
        if not tried:
            return "has more stages than the model has layers"
        if not possible:
            return self.refusals[tried[0]]
        if self.request.solver == "vpipe" and not any(map(plain, possible)):
            return "not known to the heuristic"
        return "cannot be had" if self.request.memory_bytes is None else "does not fit"

    def _choices(self, schedule: str, microbatches: int) -> Iterator[Choice]:
        request, recipe = self.request, recipe_named(schedule)
        if request.placement is not None:
            yield Choice(schedule, microbatches, request.placement)
            return
        for width in range(1, request.ranks + 1):
            stages = request.ranks // width * recipe.chunks
            if recipe.chunks > 1 and width == request.ranks:
                continue  # one position: what several stages on a rank are for, there is not
            if request.ranks % width == 0 and stages <= request.layers and self._fits(stages):
                yield Choice(schedule, microbatches, equal_widths(schedule, request.ranks, width))
        if self.searches_widths and traits_of(recipe).by_depth:
            yield Choice(schedule, microbatches, None)

    def _fits(self, stages: int) -> bool:
        """Whether there may be so many stages."""
        told = self.request.recompute
        listed = None if told is None or isinstance(told, (int, float)) else len(told)
        partition = self.request.partition
        return (listed or stages) == stages and (len(partition) if partition else stages) == stages

    @property
    def searches_widths(self) -> bool:
        """Whether stages may get unequal numbers of replicas."""
        request = self.request
        free = request.placement is None and (request.recompute is None or isinstance(request.recompute, (int, float)))
        return free and 2 < request.ranks <= MOST_RANKS and request.layers <= MOST_LAYERS

    def _every(self, schedule: str, microbatches: int) -> int | None:
        return None if recipe_named(schedule).flush else self.request.update_every.get(microbatches)

    def spans(self, microbatches: int, limit_bytes: int | None, free: bool = False) -> StageTable:
        """Of the profile for a number of microbatches.

        Args:
            free: from what the request says about recomputing.
        """
        key = microbatches, limit_bytes, free
        if key not in self._spans:
            told = None if free else self._told()
            self._spans[key] = StageTable(self.request.profiles[microbatches], limit_bytes, told)
        return self._spans[key]

    def _told(self) -> frozenset[int] | None:
        """The layers that must be recomputed, where they do not depend on the partition."""
        recompute, partition = self.request.recompute, self.request.partition
        if recompute is None or isinstance(recompute, (int, float)):
            return None
        if partition is not None:
            return frozenset[int]().union(*recomputed_layers(recompute, partition))
        listed = [entry for entry in recompute if not isinstance(entry, (int, float))]
        return frozenset(number for entry in listed for number in entry) if listed else None

    def _shares(self) -> Sequence[float] | float | None:
        recompute = self.request.recompute
        if recompute is None or isinstance(recompute, (int, float)):
            return recompute
        shares = [entry for entry in recompute if isinstance(entry, (int, float))]
        return None if self._told() is not None else shares

    def formula(self, choice: Choice, limit_bytes: int | None, share: float | None = None) -> CostModel:
        """What a choice costs.

        Args:
            share: of the layers of each stage to recompute, instead of what the request says.
        """
        request, ranks = self.request, self.request.ranks
        form = ScheduleModel(choice.schedule, choice.microbatches, self._every(choice.schedule, choice.microbatches),
                             ranks, choice.placement)
        if choice.placement is not None:
            order = [rank for crew in choice.placement for rank in crew]
            widths: Mapping[int, Sequence[int]] = behind_of(choice.placement)
        else:
            order = list(range(ranks))
            # A replica with one microbatch pipelines nothing; a whole model on every rank is a choice of its own.
            most = choice.microbatches // 2 if form.flush else ranks
            widths = {behind: range(1, min(behind, max(1, most)) + 1) for behind in range(1, ranks + 1)}
        return CostModel(self.spans(choice.microbatches, limit_bytes, share is not None), form, widths, order,
                         self._shares() if share is None else share, request.partition)

    def draft(self, choice: Choice, share: float | None = None, limited: bool = True) -> Draft | None:
        """The best partition, with what it recomputes; None when nothing fits.

        Args:
            share: see :meth:`formula`.
            limited: whether the memory is.
        """
        self.considered += 1
        limit = self.request.memory_bytes if limited else None
        if chunked(choice):
            assert choice.placement is not None
            told = self._shares() if share is None else share
            return cut_in_chunks(self.spans(choice.microbatches, limit, share is not None), choice.schedule,
                                 choice.microbatches, choice.placement, told, self.request.partition)
        formula = self.formula(choice, limit, share)
        best = formula.best()
        if best is None:
            return None
        every = self._every(choice.schedule, choice.microbatches)
        cuts = [best.cut, *sorted(best.others, key=formula.cost)]
        if choice.placement is None:
            refusals = {cut: self.refusal(choice, cut) for cut in cuts}
            cuts = [cut for cut in cuts if refusals[cut] is None]
            if not cuts:
                self.refusals[choice] = refusals[best.cut] or ""
                return None
        chosen, placement = cuts[0], choice.placement or _placed(cuts[0])
        others = [cut for cut in cuts[1:] if choice.placement is not None or _placed(cut) == placement]
        return Draft(choice.schedule, choice.microbatches, every, placement, *_stages(formula, chosen),
                     formula.seconds_per_sample(formula.cost(chosen)), formula.seconds_per_sample(best.bound),
                     tuple(_stages(formula, cut) for cut in others[:MOST_OTHERS]))

    def refusal(self, choice: Choice, cut: Cut) -> str | None:
        """Why a choice's schedule cannot have the replicas of a cut, if it cannot."""
        placement = choice.placement or _placed(cut)
        return refusal_of(choice.schedule, placement, choice.microbatches,
                          self._every(choice.schedule, choice.microbatches))

    def leanest_in_chunks(self, choice: Choice) -> Iterator[Draft]:
        """Partitions for a choice with several stages on each rank, whatever they hold: with as little as can be."""
        assert choice.placement is not None
        told = self._shares()
        for share in (1.0, 0.0) if self.request.recompute is None else (told,):
            draft = cut_in_chunks(self.spans(choice.microbatches, None), choice.schedule, choice.microbatches,
                                  choice.placement, share, self.request.partition)
            if draft is not None:
                yield draft

    def draft_of_paper(self, choice: Choice) -> Draft | None:
        """The same by the heuristic of the VPipe paper, which knows one stage per rank and one rank per stage."""
        if not plain(choice):
            return None
        assert choice.placement is not None
        self.considered += 1
        formula = self.formula(choice, self.request.memory_bytes)
        found = balanced(formula, len(choice.placement))
        if found is None:
            return None
        partition, sets, seconds = found
        return Draft(choice.schedule, choice.microbatches, self._every(choice.schedule, choice.microbatches),
                     choice.placement, partition, sets, formula.seconds_per_sample(seconds), None)

    def at(self, choice: Choice, partition: Sequence[int]) -> tuple[tuple[int, ...], tuple[frozenset[int], ...]] | None:
        """A partition, and what it recomputes under a choice; None where it does not fit."""
        assert choice.placement is not None
        formula = self.formula(choice, self.request.memory_bytes)
        stops = [sum(partition[:stage + 1]) for stage in range(len(partition))]
        parts = tuple(StageSlice(stop - size, stop, len(crew))
                      for stop, size, crew in zip(stops, partition, choice.placement, strict=True))
        sets = _sets(formula, parts)
        return None if sets is None else (tuple(partition), sets)


def chunked(choice: Choice) -> bool:
    """Whether ranks hold several stages."""
    return choice.placement is not None and len(set(choice.placement)) < len(choice.placement)


def plain(choice: Choice) -> bool:
    """Whether a choice has one stage per rank and one rank per stage."""
    return not chunked(choice) and not _wide(choice)


def _wide(choice: Choice) -> bool:
    return choice.placement is None or any(len(crew) > 1 for crew in choice.placement)


def _placed(cut: Cut) -> Placement:
    return placement_of_widths(tuple(part.width for part in cut.parts))


def behind_of(placement: Placement) -> dict[int, tuple[int]]:
    """The width of every stage, by the ranks in and behind it."""
    widths = [len(crew) for crew in placement]
    return {sum(widths[stage:]): (width,) for stage, width in enumerate(widths)}


def _stages(formula: CostModel, cut: Cut) -> tuple[tuple[int, ...], tuple[frozenset[int], ...]]:
    sets = _sets(formula, cut.parts)
    assert sets is not None, "it was found to fit"
    return tuple(part.stop - part.first for part in cut.parts), sets


def _sets(formula: CostModel, parts: Sequence[StageSlice]) -> tuple[frozenset[int], ...] | None:
    behind, sets = formula.form.ranks, []
    for first, stop, width in parts:
        layers = formula.spans.recomputed(first, stop, formula.demand(behind, width))
        if layers is None:
            return None
        sets.append(layers)
        behind -= width
    return tuple(sets)
