"""Search the best partition by dynamic programming over layers and ranks.

Stages are chosen from the last to the first. The number of ranks of a stage and all later ones fixes what it holds. The
bottleneck of a partition is the cost of its most expensive stage. Two problems are solved exactly: the partition with
the smallest bottleneck, and the one with the smallest sum of costs among those whose bottleneck is within a limit. The
second, solved for better and better limits, gives the smallest sum plus bottleneck, or any cost that grows with both.

Source: Zheng et al., Alpa (OSDI 2022), section 5.2, which tries every limit. Here limits that cannot win are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vpipe.description.cut import ranges

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TOLERANCE = 1e-4
"""The cost of the partition that is found exceeds the least possible cost by at most this share."""

MOST_LIMITS = 60
"""Limits of the bottleneck that are tried at most."""


class StageRange(NamedTuple):
    """A stage: its first layer, the layer after its last, and its number of replicas."""

    first: int
    stop: int
    width: int


def stage_ranges(partition: Sequence[int], widths: Sequence[int]) -> tuple[StageRange, ...]:
    """Return the stages of a partition with their numbers of replicas."""
    return tuple(StageRange(layers.start, layers.stop, width)
                 for layers, width in zip(ranges(partition), widths, strict=True))


class FoundPartition(NamedTuple):
    """A partition with replicas: the sum of its stages' costs, and the bottleneck of them."""

    sum: float
    bottleneck: float
    stages: tuple[StageRange, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(each.width for each in self.stages)

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(each.stop - each.first for each in self.stages)


class BestPartition(NamedTuple):
    """The best partition."""

    found: FoundPartition
    cost: float
    lower_bound: float  # no partition costs less
    others: tuple[FoundPartition, ...]  # further good ones, in the order in which they were found


Evaluate = Callable[[int, int, Integers, Integers], tuple[Floats, Floats]]
"""``evaluate(ranks_left, width, first, stop)``: of stages with ``width`` ranks each, which have ``ranks_left`` ranks
together with all later stages: what each adds to the sum, and its own cost; infinite where the stage is impossible."""


@dataclass(frozen=True)
class _StageGrid:
    """All stages of one width with the same number of ranks for them and the later stages."""

    width: int
    first: Integers  # first layers, a column
    lengths: Integers  # numbers of layers, a row
    sums: Floats  # of each stage, by first layer and length
    costs: Floats


@dataclass(frozen=True)
class PartitionProblem:
    """A model to divide into stages, and ranks to divide among these."""

    layers: int  # of the model
    # by the ranks of a stage and the later ones, the replicas it may have; a number that is missing never occurs
    widths: Mapping[int, Sequence[int]]
    ranks: int  # in all
    least_cost_sums: Floats  # running sum over layers of their least cost, one entry more than there are layers
    room: Mapping[int, float]  # by width, how much of that sum fits into a stage of cost 1
    evaluate: Evaluate
    fixed: Sequence[int] | None = None  # layers per stage, where there is one partition alone

    def lower_bound(self) -> float:
        """Return a lower bound of the bottleneck."""
        return float(self.least_cost_sums[-1]) / (self.ranks * self._room_per_rank)

    @property
    def _room_per_rank(self) -> float:
        return max(room / width for width, room in self.room.items())

    def within(self, limit: float) -> StageOptions:
        """Return all stages of the partitions whose bottleneck is at most ``limit``."""
        limit *= 1 + 1e-9  # running sums are rounded
        sums, windows = self.least_cost_sums, {0: np.array([self.layers])}
        for ranks_left in self.widths:
            room = limit * self._room_per_rank
            fits = (sums <= room * (self.ranks - ranks_left)) & (sums[-1] - sums <= room * ranks_left)
            fits[-1] = False
            windows[ranks_left] = np.flatnonzero(fits) if ranks_left < self.ranks else np.array([0])
        options: dict[int, list[_StageGrid]] = {}
        for ranks_left, widths in self.widths.items():
            grids = (self._grid(ranks_left, width, windows[ranks_left], windows[ranks_left - width], limit)
                     for width in widths if ranks_left - width in windows)
            options[ranks_left] = [grid for grid in grids if grid is not None]
        everything = all(limit * room >= self.least_cost_sums[-1] for room in self.room.values())
        return StageOptions(self, options, everything)

    def _grid(self, ranks_left: int, width: int, first: Integers, stops: Integers, limit: float) -> _StageGrid | None:
        if not len(first) or not len(stops):
            return None
        least = self.least_cost_sums
        longest = np.searchsorted(least, least[first] + limit * self.room[width], "right") - 1
        lengths = np.arange(max(1, stops[0] - first[-1]), min(stops[-1] - first[0], (longest - first).max()) + 1)
        if not len(lengths):
            return None
        stop = first[:, None] + lengths
        real = (stop >= stops[0]) & (stop <= stops[-1]) & (stop <= longest[:, None])
        if self.fixed is not None:
            ends = np.cumsum(self.fixed)
            own = np.zeros(self.layers, int)  # by first layer of a fixed stage, where it ends; 0 where none begins
            own[ends - self.fixed] = ends
            real &= stop == own[first][:, None]
        places = np.flatnonzero(real)
        if not len(places):
            return None
        sums, costs = np.full(stop.size, np.inf), np.full(stop.size, np.inf)
        sums[places], costs[places] = self.evaluate(ranks_left, width, first[places // len(lengths)],
                                                    stop.ravel()[places])
        return _StageGrid(width, first, lengths, sums.reshape(stop.shape), costs.reshape(stop.shape))


@dataclass(frozen=True)
class StageOptions:
    """The stages from which a partition is made."""

    problem: PartitionProblem
    grids: Mapping[int, Sequence[_StageGrid]]  # stages by the ranks of them and the later stages
    everything: bool  # whether these are all possible stages

    def smallest_bottleneck(self) -> FoundPartition | None:
        """Return the partition with the smallest bottleneck; None when there is none."""
        return self._best(lambda grid, rest: np.maximum(grid.costs, rest))

    def smallest_sum(self, limit: float) -> FoundPartition | None:
        """Return the partition with the smallest sum and a bottleneck of at most ``limit``; None when there is none."""
        return self._best(lambda grid, rest: np.where(grid.costs <= limit, grid.sums, np.inf) + rest)

    def _best(self, combined: Callable[[_StageGrid, Floats], Floats]) -> FoundPartition | None:
        layers, ranks = self.problem.layers, self.problem.ranks
        rest = {0: np.full(2 * layers + 1, np.inf)}  # so long that stages beyond the last layer can be looked up
        rest[0][layers] = 0.0
        taken: dict[int, tuple[Integers, Integers]] = {}  # by ranks: which grid, and the length
        for ranks_left in sorted(self.grids):
            best = rest[ranks_left] = np.full(2 * layers + 1, np.inf)
            which, length = taken[ranks_left] = np.zeros(layers, int), np.zeros(layers, int)
            for number, grid in enumerate(self.grids[ranks_left]):
                values = combined(grid, rest[ranks_left - grid.width][grid.first[:, None] + grid.lengths])
                column = values.argmin(axis=1)
                least = values[np.arange(len(column)), column]
                better = least < best[grid.first]
                rows = grid.first[better]
                best[rows], which[rows], length[rows] = least[better], number, grid.lengths[column[better]]
        if ranks not in rest or not np.isfinite(rest[ranks][0]):
            return None
        stages, ranks_left, first, total, bottleneck = [], ranks, 0, 0.0, 0.0
        while ranks_left:
            grid, size = self.grids[ranks_left][taken[ranks_left][0][first]], int(taken[ranks_left][1][first])
            at = int(np.searchsorted(grid.first, first)), size - int(grid.lengths[0])
            total, bottleneck = total + float(grid.sums[at]), max(bottleneck, float(grid.costs[at]))
            stages.append(StageRange(first, first + size, grid.width))
            first, ranks_left = first + size, ranks_left - grid.width
        return FoundPartition(total, bottleneck, tuple(stages))


def unreplicated_problem(stages: int, least_cost_sums: Floats, evaluate: Evaluate, room: float = 1.0,
                         fixed: Sequence[int] | None = None) -> PartitionProblem:
    """Return the problem of a pipeline with one rank per stage; arguments as for :class:`PartitionProblem`."""
    return PartitionProblem(len(least_cost_sums) - 1, dict.fromkeys(range(1, stages + 1), (1,)), stages,
                            least_cost_sums, {1: room}, evaluate, fixed)


def smallest_bottleneck(problem: PartitionProblem,
                        give_up: Callable[[], bool] = lambda: False) -> FoundPartition | None:
    """Return the partition with the smallest bottleneck; None when there is none.

    Args:
        give_up: returns whether there is surely none. It is called once at most, when the limit exceeds 1.5 times the
            lower bound; before that, a partition of most models is found.
    """
    limit, asked = problem.lower_bound() * 1.02 or np.inf, False
    while True:
        options = problem.within(limit)
        found = options.smallest_bottleneck()
        if found is not None and (found.bottleneck <= limit or options.everything):
            return found
        if options.everything:
            return None
        if not asked and limit > 1.5 * problem.lower_bound():
            asked = True
            if give_up():
                return None
        limit = 1.3 * limit if found is None else min(found.bottleneck, 2 * limit)


def smallest_cost(problem: PartitionProblem, start: FoundPartition, cost: Callable[[FoundPartition], float],
                  combined: Callable[[float, float], float], widest: float, lower_bound: float) -> BestPartition:
    """Return the partition that costs least.

    Args:
        start: the partition with the smallest bottleneck.
        cost: of a partition; never less than ``combined`` of its sum and its bottleneck.
        combined: grows with both.
        widest: a partition with a greater bottleneck costs more than the start.
        lower_bound: no partition costs less.
    """
    options, found = problem.within(widest), [start]

    def try_limit(limit: float) -> FoundPartition:
        best = options.smallest_sum(limit)
        assert best is not None, "the start is within every limit"
        found.append(best)
        return best

    try_limit(start.bottleneck)
    high = try_limit(widest)
    lower_bounds = [combined(high.sum, high.bottleneck)]  # of the partitions that were found
    intervals = [(combined(high.sum, start.bottleneck), start.bottleneck, high)]  # to search, each with its lower bound
    for _ in range(MOST_LIMITS):
        least, lower, upper = min(intervals, key=lambda part: part[0])
        if max(lower_bound, least) >= min(map(cost, found)) * (1 - TOLERANCE):
            break
        intervals.remove((least, lower, upper))
        middle = (lower + upper.bottleneck) / 2
        best = try_limit(middle)
        lower_bounds.append(combined(best.sum, best.bottleneck))
        intervals += [(combined(best.sum, lower), lower, best), (combined(upper.sum, middle), middle, upper)]
    chosen = min(found, key=cost)
    lower_bound = max(lower_bound, min([*lower_bounds, *(part[0] for part in intervals)]))
    return BestPartition(chosen, cost(chosen), min(cost(chosen), lower_bound),
                         tuple(other for other in dict.fromkeys(found) if other.stages != chosen.stages))


def running_sum(numbers: Sequence[float]) -> Floats:
    """Return the sums of the first 0, 1, ... of some numbers."""
    return np.concatenate([[0.0], np.cumsum(np.array(numbers, float))])
