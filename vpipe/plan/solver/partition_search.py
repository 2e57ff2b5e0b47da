"""Search the best partition by dynamic programming over layers and ranks.

Stages are chosen from the last to the first. The number of ranks behind a cut fixes what the stage before it holds. Two
problems are solved exactly: the cut with the smallest greatest cost of a stage, and the cut with the smallest sum of
costs while the greatest stays within a bound. The second, solved for better and better bounds, gives the smallest sum
plus greatest.

Source: Zheng et al., Alpa (OSDI 2022), section 5.2, which tries every bound. Here bounds that cannot win are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.recompute import ranges

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TOLERANCE = 1e-4
"""The best that is found is within this of the best, relatively."""

MOST_BOUNDS = 60
"""Bounds that are tried at most."""


class StageSlice(NamedTuple):
    """A stage: its first layer, the one behind its last, and its replicas."""

    first: int
    stop: int
    width: int


def slices_of(partition: Sequence[int], widths: Sequence[int]) -> tuple[StageSlice, ...]:
    """Return the stages of a partition with their numbers of replicas."""
    return tuple(StageSlice(layers.start, layers.stop, width)
                 for layers, width in zip(ranges(partition), widths, strict=True))


class Cut(NamedTuple):
    """A partition with replicas: the sum and the greatest of its stages' costs."""

    sum: float
    greatest: float
    slices: tuple[StageSlice, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(each.width for each in self.slices)


class BestCut(NamedTuple):
    """The best cut."""

    cut: Cut
    cost: float
    bound: float  # no cut costs less
    others: tuple[Cut, ...]  # further good cuts, in the order in which they were found


Evaluate = Callable[[int, int, Integers, Integers], tuple[Floats, Floats]]
"""``evaluate(behind, width, first, stop)``: of stages with ``width`` ranks, and ``behind`` ranks in and behind them,
what each adds to the sum, and its own cost; infinite where the stage is impossible."""


@dataclass(frozen=True)
class _StageGrid:
    """All stages of one width with the same number of ranks in and behind them."""

    width: int
    first: Integers  # first layers, a column
    lengths: Integers  # numbers of layers, a row
    sums: Floats  # of each stage, by first layer and length
    costs: Floats


@dataclass(frozen=True)
class CutProblem:
    """A model to cut."""

    layers: int  # of the model
    # by the ranks in and behind a stage, the replicas it may have; a number that is missing never occurs
    widths: Mapping[int, Sequence[int]]
    ranks: int  # in all
    floor: Floats  # running sum over layers of their least cost, one entry more than there are layers
    room: Mapping[int, float]  # by width, how much of that fits into a stage of cost 1
    evaluate: Evaluate

    def least(self) -> float:
        """Return a lower bound of the greatest cost of a cut."""
        return float(self.floor[-1]) / (self.ranks * self._per_rank)

    @property
    def _per_rank(self) -> float:
        return max(room / width for width, room in self.room.items())

    def within(self, bound: float) -> StageOptions:
        """Return all stages that a cut may have whose greatest cost is at most ``bound``."""
        bound *= 1 + 1e-9  # running sums are rounded
        windows = {0: np.array([self.layers])}
        for behind in self.widths:
            room = bound * self._per_rank
            fits = (self.floor <= room * (self.ranks - behind)) & (self.floor[-1] - self.floor <= room * behind)
            fits[-1] = False
            windows[behind] = np.flatnonzero(fits) if behind < self.ranks else np.array([0])
        options: dict[int, list[_StageGrid]] = {}
        for behind, widths in self.widths.items():
            grids = (self._grid(behind, width, windows[behind], windows[behind - width], bound)
                     for width in widths if behind - width in windows)
            options[behind] = [grid for grid in grids if grid is not None]
        everything = all(bound * room >= self.floor[-1] for room in self.room.values())
        return StageOptions(self, options, everything)

    def _grid(self, behind: int, width: int, first: Integers, stops: Integers, bound: float) -> _StageGrid | None:
        if not len(first) or not len(stops):
            return None
        longest = np.searchsorted(self.floor, self.floor[first] + bound * self.room[width], "right") - 1
        lengths = np.arange(max(1, stops[0] - first[-1]), min(stops[-1] - first[0], (longest - first).max()) + 1)
        if not len(lengths):
            return None
        stop = first[:, None] + lengths
        real = (stop >= stops[0]) & (stop <= stops[-1]) & (stop <= longest[:, None])
        places = np.flatnonzero(real)
        if not len(places):
            return None
        sums, costs = np.full(stop.size, np.inf), np.full(stop.size, np.inf)
        sums[places], costs[places] = self.evaluate(behind, width, first[places // len(lengths)], stop.ravel()[places])
        return _StageGrid(width, first, lengths, sums.reshape(stop.shape), costs.reshape(stop.shape))


@dataclass(frozen=True)
class StageOptions:
    """The stages from which a cut is made."""

    problem: CutProblem
    grids: Mapping[int, Sequence[_StageGrid]]  # stages by the ranks in and behind them
    everything: bool  # these are all possible stages

    def smallest_greatest(self) -> Cut | None:
        """Return the cut with the smallest greatest cost; None when there is none."""
        return self._best(lambda grid, rest: np.maximum(grid.costs, rest))

    def smallest_sum(self, bound: float) -> Cut | None:
        """Return the cut with the smallest sum in which no cost is over ``bound``; None when there is none."""
        return self._best(lambda grid, rest: np.where(grid.costs <= bound, grid.sums, np.inf) + rest)

    def _best(self, combined: Callable[[_StageGrid, Floats], Floats]) -> Cut | None:
        layers, ranks = self.problem.layers, self.problem.ranks
        rest = {0: np.full(2 * layers + 1, np.inf)}  # so long that stages beyond the last layer can be looked up
        rest[0][layers] = 0.0
        taken: dict[int, tuple[Integers, Integers]] = {}  # by ranks: which grid, and the length
        for behind in sorted(self.grids):
            best = rest[behind] = np.full(2 * layers + 1, np.inf)
            which, length = taken[behind] = np.zeros(layers, int), np.zeros(layers, int)
            for number, grid in enumerate(self.grids[behind]):
                values = combined(grid, rest[behind - grid.width][grid.first[:, None] + grid.lengths])
                column = values.argmin(axis=1)
                least = values[np.arange(len(column)), column]
                better = least < best[grid.first]
                rows = grid.first[better]
                best[rows], which[rows], length[rows] = least[better], number, grid.lengths[column[better]]
        if ranks not in rest or not np.isfinite(rest[ranks][0]):
            return None
        slices, behind, first, total, greatest = [], ranks, 0, 0.0, 0.0
        while behind:
            grid, size = self.grids[behind][taken[behind][0][first]], int(taken[behind][1][first])
            at = int(np.searchsorted(grid.first, first)), size - int(grid.lengths[0])
            total, greatest = total + float(grid.sums[at]), max(greatest, float(grid.costs[at]))
            slices.append(StageSlice(first, first + size, grid.width))
            first, behind = first + size, behind - grid.width
        return Cut(total, greatest, tuple(slices))


def unreplicated_problem(stages: int, floor: Floats, evaluate: Evaluate, room: float = 1.0) -> CutProblem:
    """Return the problem of a pipeline with one rank per stage; arguments as for :class:`CutProblem`."""
    return CutProblem(len(floor) - 1, dict.fromkeys(range(1, stages + 1), (1,)), stages, floor, {1: room}, evaluate)


def smallest_greatest(problem: CutProblem, give_up: Callable[[], bool] = lambda: False) -> Cut | None:
    """Return the cut with the smallest greatest cost; None when there is none.

    Args:
        give_up: tells whether there is surely none. It is called once, where most models have had a cut for long.
    """
    bound, asked = problem.least() * 1.02 or np.inf, False
    while True:
        options = problem.within(bound)
        found = options.smallest_greatest()
        if found is not None and (found.greatest <= bound or options.everything):
            return found
        if options.everything:
            return None
        if not asked and bound > 1.5 * problem.least():
            asked = True
            if give_up():
                return None
        bound = 1.3 * bound if found is None else min(found.greatest, 2 * bound)


def smallest_cost(problem: CutProblem, start: Cut, cost: Callable[[Cut], float], least_sum: float,
                  floor: float) -> BestCut:
    """Return the cut that costs least.

    Args:
        start: the cut with the smallest greatest cost.
        cost: of a cut; never less than its sum plus its greatest.
        least_sum: no cut has a smaller sum.
        floor: no cut costs less.
    """
    widest = cost(start) - least_sum  # a cut with a greater one costs more than this one
    options, found = problem.within(widest), [start]

    def tried(bound: float) -> Cut:
        cut = options.smallest_sum(bound)
        assert cut is not None, "the start is within every bound"
        found.append(cut)
        return cut

    tried(start.greatest)
    high = tried(widest)
    bounds = [high.sum + high.greatest]  # lower bounds of the cuts that were found
    intervals = [(start.greatest + high.sum, start.greatest, high)]  # to search, each with its lower bound
    for _ in range(MOST_BOUNDS):
        least, lower, upper = min(intervals, key=lambda part: part[0])
        if max(floor, least) >= min(map(cost, found)) * (1 - TOLERANCE):
            break
        intervals.remove((least, lower, upper))
        middle = (lower + upper.greatest) / 2
        cut = tried(middle)
        bounds.append(cut.sum + cut.greatest)
        intervals += [(lower + cut.sum, lower, cut), (middle + upper.sum, middle, upper)]
    return _best_cut(found, cost, max(floor, min([*bounds, *(part[0] for part in intervals)])))


def smallest_greatest_or_share(problem: CutProblem, start: Cut, cores: float) -> BestCut:
    """Return the cut with the least of: its greatest cost, or its sum divided by ``cores`` where that is more.

    Args:
        start: the cut with the smallest greatest cost.
    """
    def cost(cut: Cut) -> float:
        return max(cut.greatest, cut.sum / cores)

    found, lower, upper = [start], start.greatest, cost(start)
    options = problem.within(upper)
    for bound in (lower, upper):
        if (cut := options.smallest_sum(bound)) is not None:
            found.append(cut)
    least = found[-1].sum / cores  # no cut that can win has less work
    upper = min(map(cost, found))
    for _ in range(MOST_BOUNDS):
        if upper * (1 - TOLERANCE) <= max(lower, least):
            break
        middle = (lower + upper) / 2
        cut = options.smallest_sum(middle)
        assert cut is not None, "the start is within every bound"
        found.append(cut)
        upper = min(upper, cost(cut))
        if cut.sum / cores > middle:  # and so it is with every smaller bound
            lower = middle
        else:
            upper = min(upper, middle)
    return _best_cut(found, cost, max(lower, least))


def _best_cut(found: Sequence[Cut], cost: Callable[[Cut], float], bound: float) -> BestCut:
    best = min(found, key=cost)
    return BestCut(best, cost(best), min(cost(best), bound),
                   tuple(cut for cut in dict.fromkeys(found) if cut.slices != best.slices))


def evenly(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the sizes of consecutive parts whose heaviest is as light as possible."""
    running = np.concatenate([[0.0], np.cumsum(np.array(weights, float))])

    def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        own = running[stop] - running[first]
        return own, own

    found = smallest_greatest(unreplicated_problem(parts, running, evaluate))
    assert found is not None, "there are as many items as parts"
    return tuple(part.stop - part.first for part in found.slices)
