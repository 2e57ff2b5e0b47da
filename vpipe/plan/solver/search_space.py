"""The search space of a request: every possible choice of schedule, microbatches and replicas, solved one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from vpipe.description.cut import recomputed_layers
from vpipe.errors import counted
from vpipe.plan.solver.choice import Candidate, Choice, Stages, equal_widths
from vpipe.plan.solver.chunked_partition import chunked_candidate
from vpipe.plan.solver.cost_model import CostModel
from vpipe.plan.solver.partition_search import StageRange, stage_ranges
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.stage_table import StageTable
from vpipe.plan.solver.vpipe_heuristic import balanced_candidate

UNEVEN = "its replicas cannot share the microbatches of an update evenly"

MOST_OTHERS = 2
"""Further partitions of a choice that may be simulated."""


@dataclass
class SearchSpace:
    """The choices of a request, with the tables that they share."""

    request: PlanRequest
    tried: dict[Choice, None] = field(default_factory=dict)  # all choices so far
    refusals: dict[Choice, str] = field(default_factory=dict)  # why some of them are impossible, whatever the memory
    considered: int = 0  # how many choices were solved
    _shares: Sequence[float] | float | None = None  # of a stage's layers that the request says are recomputed
    _required: frozenset[int] | None = None  # layers that the request says are recomputed, and no others
    _tables: dict[tuple[int, int], StageTable] = field(default_factory=dict)  # by microbatches and indices of a batch

    def __post_init__(self) -> None:
        recompute, partition = self.request.recompute, self.request.partition
        if recompute is None or isinstance(recompute, (int, float)):
            self._shares = recompute
        elif partition is not None:
            self._required = frozenset[int]().union(*recomputed_layers(recompute, partition))
        elif shares := [entry for entry in recompute if isinstance(entry, (int, float))]:
            self._shares = shares
        else:
            self._required = frozenset(number for entry in recompute if isinstance(entry, Sequence) for number in entry)

    def choices(self) -> Iterator[Choice]:
        """Yield every choice that the schedules can have; note why others are refused."""
        for schedule in self.request.schedules:
            for microbatches in sorted(self.request.profiles):
                for choice in self._choices(schedule, microbatches):
                    self.tried[choice] = None
                    why = choice.traits.problem or choice.refusal if choice.update_every != 0 else UNEVEN
                    if why is None:
                        yield choice
                    else:
                        self.refusals[choice] = why

    def why_none(self, schedule: str | None = None, microbatches: int | None = None, unreplicated: bool = False) -> str:
        """Return why no choice with a schedule, a number of microbatches, or without replicas gave a plan."""
        tried = [choice for choice in self.tried if schedule in (None, choice.schedule)
                 and microbatches in (None, choice.microbatches) and not (unreplicated and choice.replicated)]
        possible = [choice for choice in tried if choice not in self.refusals]
        if not tried and self.request.stages is not None:
            return f"cannot have {counted(self.request.stages, 'stage')}"
        if not tried:
            return "has more stages than the model has layers"
        if not possible:
            return self.refusals[tried[0]]
        if self.request.solver == "vpipe" and not any(choice.plain for choice in possible):
            return "not known to the heuristic"
        return "cannot be had" if self.request.memory_bytes is None else "does not fit"

    def _choices(self, schedule: str, microbatches: int) -> Iterator[Choice]:
        request, one = self.request, self.request.choice(schedule, microbatches)
        registered, every = one.registered, one.update_every
        if request.placement is not None:
            yield one
            return
        for width in range(1, request.ranks + 1):
            stages = request.ranks // width * registered.chunks
            if registered.chunks > 1 and width == request.ranks:
                continue  # one position, where several stages on a rank gain nothing
            if request.ranks % width == 0 and stages <= request.layers and self._allows(stages, width):
                own = every // width * (every % width == 0) if every and request.shared_updates else every
                yield replace(one, update_every=own, placement=equal_widths(schedule, request.ranks, width))
        free = request.stages is None and (request.recompute is None or isinstance(request.recompute, (int, float)))
        if (free and request.ranks > 2 and request.small and not (every and request.shared_updates)
                and one.any_widths):
            yield one

    def _allows(self, stages: int, width: int) -> bool:
        """Tell whether the request allows so many stages, with so many replicas each."""
        request = self.request
        if request.stages is not None and (stages, width) != (request.stages, max(1, request.ranks // request.stages)):
            return False
        return all(len(each) in (0, stages) for each in (request.partition, request.recompute)
                   if isinstance(each, Sequence))

    def _table(self, choice: Choice) -> StageTable:
        key = choice.microbatches, choice.indices
        if key not in self._tables:
            profile = choice.per_index(self.request.profiles[choice.microbatches])
            self._tables[key] = StageTable(profile, self.request.tensor_bytes, self._required)
        return self._tables[key]

    def cost_model(self, choice: Choice) -> CostModel:
        return CostModel(self._table(choice), choice, self._shares, self.request.partition)

    def solve(self, choice: Choice) -> Candidate | None:
        """Return the best partition of a choice, with what it recomputes; None when nothing fits."""
        self.considered += 1
        if choice.chunked:
            return chunked_candidate(self._table(choice), choice, self._shares, self.request.partition)
        costs = self.cost_model(choice)
        best = costs.best()
        if best is None:
            return None
        partitions = [best.found, *sorted(best.others, key=costs.cost)]
        if choice.placement is None:
            refusals = {each: choice.with_widths(each.widths).refusal for each in partitions}
            partitions = [each for each in partitions if refusals[each] is None]
            if not partitions:
                self.refusals[choice] = refusals[best.found] or ""
                return None
        chosen, *others = partitions
        alike = [chosen, *[each for each in others if each.widths == chosen.widths][:MOST_OTHERS]]
        first, *further = [stages for each in alike if (stages := _stages(costs, each.stages)) is not None]
        return Candidate(choice.with_widths(chosen.widths), *first, costs.seconds_per_sample(costs.cost(chosen)),
                         costs.seconds_per_sample(best.lower_bound), further)

    def of_least_memory(self, choice: Choice) -> tuple[float, Candidate] | None:
        """Return the bytes of the fullest rank of an unchunked choice where these are fewest, and how; None if none."""
        costs = self.cost_model(choice)
        if (found := costs.least_memory()) is None:
            return None
        placed = choice.with_widths(found.widths)
        if (why := placed.refusal) is not None:
            self.refusals[choice] = why
            return None
        sets = []
        for (first, stop, _), demand in costs.demands(found.stages):
            required, layers = costs.table.required(first, stop, demand), frozenset(range(first, stop))
            sets.append(min([required] if required is not None else [frozenset[int](), layers], key=partial(
                costs.table.peak_bytes, first, stop, demand)))
        return found.bottleneck, Candidate(placed, found.partition, tuple(sets), math.inf)

    def chunked_of_least_memory(self, choice: Choice) -> Iterator[Candidate]:
        """Yield partitions of a chunked choice that hold as little as possible, whatever the limit."""
        for recompute in (1.0, 0.0) if self.request.recompute is None else (self.request.recompute,):
            request = replace(self.request, memory_bytes=None, recompute=recompute)
            if (candidate := SearchSpace(request).solve(choice)) is not None:
                yield candidate

    def solve_by_heuristic(self, choice: Choice) -> Candidate | None:
        """Return the partition of the VPipe paper's heuristic, which knows plain choices only; None without one."""
        if not choice.plain:
            return None
        self.considered += 1
        return balanced_candidate(self.cost_model(choice))

    def stages_of(self, choice: Choice, partition: Sequence[int]) -> Stages | None:
        """Return a partition with what it recomputes under a choice; None where it does not fit."""
        return _stages(self.cost_model(choice), stage_ranges(partition, list(map(len, choice.groups))))


def _stages(costs: CostModel, ranges: Sequence[StageRange]) -> Stages | None:
    found = [costs.table.recompute_set(first, stop, demand) for (first, stop, _), demand in costs.demands(ranges)]
    sets = tuple(layers for layers in found if layers is not None)
    return (tuple(each.stop - each.first for each in ranges), sets) if len(sets) == len(found) else None
