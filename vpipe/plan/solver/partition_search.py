"""Where to cut: dynamic programming over layers and ranks.

Stages are chosen from the last to the first. What is known of the layers behind a cut is how many ranks they have,
which fixes what a stage before it holds. Two questions are answered exactly: which cut has the smallest greatest cost,
and which has the smallest sum of costs while the greatest stays within a bound. From the second, asked for ever better
bounds, comes the smallest sum plus greatest.

Source of the last: Zheng et al., Alpa (OSDI 2022), section 5.2, which tries every bound; here those that cannot win are
passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TOLERANCE = 1e-4
"""Relative: what is called the best is within this of the best."""

MOST_BOUNDS = 60
"""Bounds that are tried at most."""


class StageSlice(NamedTuple):
    """A stage: its layers, and its replicas."""

    first: int
    stop: int
    width: int


class Cut(NamedTuple):
    """A way to cut, and what it costs."""

    sum: float
    greatest: float
    parts: tuple[StageSlice, ...]


class BestCut(NamedTuple):
    """The best of some ways to cut.

    Attributes:
        cut: it.
        cost: of it.
        bound: no cut costs less.
        others: further good ones, in the order in which they were found.
    """

    cut: Cut
    cost: float
    bound: float
    others: tuple[Cut, ...]


Evaluate = Callable[[int, int, Integers, Integers], tuple[Floats, Floats]]
"""``evaluate(behind, width, first, stop)``: of stages with ``behind`` ranks in and behind them, ``width`` of these
their own, what each adds to the sum and what it costs itself; infinite where it cannot be."""


@dataclass(frozen=True)
class _Move:
    """All stages of one width with so many ranks in and behind them.

    Attributes:
        first: of the first layers, a column.
        lengths: numbers of layers, a row.
        sums, costs: by both.
    """

    width: int
    first: Integers
    lengths: Integers
    sums: Floats
    costs: Floats


@dataclass(frozen=True)
class CutProblem:
    """A model to be cut.

    Attributes:
        layers: of the model.
        widths: by the ranks in and behind a stage, the replicas it may have; a number that is missing never occurs.
        ranks: in all.
        floor: running sum over layers of what they cost at least, one more than there are layers.
        room: by width, how much of that fits into a stage of cost 1.
        evaluate: see :data:`Evaluate`.
    """

    layers: int
    widths: Mapping[int, Sequence[int]]
    ranks: int
    floor: Floats
    room: Mapping[int, float]
    evaluate: Evaluate

    def least(self) -> float:
        """No cut has a smaller greatest cost."""
        return float(self.floor[-1]) / (self.ranks * self._per_rank)

    @property
    def _per_rank(self) -> float:
        return max(room / width for width, room in self.room.items())

    def within(self, bound: float) -> StageOptions:
        """All stages that may be part of a cut of which the greatest cost is at most ``bound``."""
        bound *= 1 + 1e-9  # running sums are rounded
        windows = {0: np.array([self.layers])}
        for behind in self.widths:
            room = bound * self._per_rank
            fits = (self.floor <= room * (self.ranks - behind)) & (self.floor[-1] - self.floor <= room * behind)
            fits[-1] = False
            windows[behind] = np.flatnonzero(fits) if behind < self.ranks else np.array([0])
        moves: dict[int, list[_Move]] = {}
        for behind, widths in self.widths.items():
            moves[behind] = [move for width in widths if behind - width in windows
                             and (move := self._move(behind, width, windows[behind], windows[behind - width],
                                                     bound)) is not None]
        everything = all(bound * room >= self.floor[-1] for room in self.room.values())
        return StageOptions(self, moves, everything)

    def _move(self, behind: int, width: int, first: Integers, stops: Integers, bound: float) -> _Move | None:
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
        return _Move(width, first, lengths, sums.reshape(stop.shape), costs.reshape(stop.shape))


@dataclass(frozen=True)
class StageOptions:
    """The stages among which a cut is chosen.

    Attributes:
        cutter: of the model.
        moves: by the ranks in and behind them.
        everything: whether these are all that there are.
    """

    cutter: CutProblem
    moves: Mapping[int, Sequence[_Move]]
    everything: bool

    def smallest_greatest(self) -> Cut | None:
        """The cut of which the greatest cost is smallest; None when there is none."""
        return self._best(lambda move, rest: np.maximum(move.costs, rest), 0.0)

    def smallest_sum(self, bound: float) -> Cut | None:
        """The cut with the smallest sum of which no cost is over ``bound``; None when there is none."""
        return self._best(lambda move, rest: np.where(move.costs <= bound, move.sums, np.inf) + rest, 0.0)

    def _best(self, combined: Callable[[_Move, Floats], Floats], nothing: float) -> Cut | None:
        layers, ranks = self.cutter.layers, self.cutter.ranks
        rest = {0: np.full(2 * layers + 1, np.inf)}  # as long as to be asked behind the last layer, too
        rest[0][layers] = nothing
        taken: dict[int, tuple[Integers, Integers]] = {}  # by ranks: which move, and the length
        for behind in sorted(self.moves):
            best = rest[behind] = np.full(2 * layers + 1, np.inf)
            which, length = taken[behind] = np.zeros(layers, int), np.zeros(layers, int)
            for number, move in enumerate(self.moves[behind]):
                values = combined(move, rest[behind - move.width][move.first[:, None] + move.lengths])
                column = values.argmin(axis=1)
                least = values[np.arange(len(column)), column]
                better = least < best[move.first]
                rows = move.first[better]
                best[rows], which[rows], length[rows] = least[better], number, move.lengths[column[better]]
        if ranks not in rest or not np.isfinite(rest[ranks][0]):
            return None
        parts, behind, first, total, greatest = [], ranks, 0, 0.0, 0.0
        while behind:
            move, size = self.moves[behind][taken[behind][0][first]], int(taken[behind][1][first])
            at = int(np.searchsorted(move.first, first)), size - int(move.lengths[0])
            total, greatest = total + float(move.sums[at]), max(greatest, float(move.costs[at]))
            parts.append(StageSlice(first, first + size, move.width))
            first, behind = first + size, behind - move.width
        return Cut(total, greatest, tuple(parts))


def smallest_greatest(cutter: CutProblem, give_up: Callable[[], bool] = lambda: False) -> Cut | None:
    """The cut of which the greatest cost is smallest; None when there is none.

    Args:
        give_up: whether there surely is none; asked once, where most models would long have had one.
    """
    bound, asked = cutter.least() * 1.02 or np.inf, False
    while True:
        moves = cutter.within(bound)
        found = moves.smallest_greatest()
        if found is not None and (found.greatest <= bound or moves.everything):
            return found
        if moves.everything:
            return None
        if not asked and bound > 1.5 * cutter.least():
            asked = True
            if give_up():
                return None
        bound = 1.3 * bound if found is None else min(found.greatest, 2 * bound)


def smallest_cost(cutter: CutProblem, start: Cut, cost: Callable[[Cut], float], least_sum: float,
                  floor: float) -> BestCut:
    """The cut that costs least.

    Args:
        start: that with the smallest greatest cost.
        cost: of a cut; never less than its sum plus its greatest.
        least_sum: no cut has a smaller sum.
        floor: no cut costs less.
    """
    widest = cost(start) - least_sum  # a cut with a greater one costs more than this one
    moves, found = cutter.within(widest), [start]

    def tried(bound: float) -> Cut:
        cut = moves.smallest_sum(bound)
        assert cut is not None, "the start is within every bound"
        found.append(cut)
        return cut

    tried(start.greatest)
    high = tried(widest)
    shown = [high.sum + high.greatest]  # lower bounds of what is not looked at any more
    ahead = [(start.greatest + high.sum, start.greatest, high)]  # lower bound, and the greatest costs between which
    for _ in range(MOST_BOUNDS):
        least, lower, upper = ahead.pop(ahead.index(min(ahead, key=lambda part: part[0])))
        shown.append(least)
        if max(floor, least) >= min(map(cost, found)) * (1 - TOLERANCE):
            break
        shown.pop()
        middle = (lower + upper.greatest) / 2
        cut = tried(middle)
        shown.append(cut.sum + cut.greatest)
        ahead += [(lower + cut.sum, lower, cut), (middle + upper.sum, middle, upper)]
    best = min(found, key=cost)
    bound = min(cost(best), max(floor, min([*shown, *(part[0] for part in ahead)])))
    return BestCut(best, cost(best), bound, tuple(cut for cut in dict.fromkeys(found) if cut.parts != best.parts))


def smallest_greatest_or_share(cutter: CutProblem, start: Cut, cores: float) -> BestCut:
    """The cut with the smallest of: its greatest cost, or the sum divided by ``cores`` where that is more.

    Args:
        start: that with the smallest greatest cost.
    """
    def cost(cut: Cut) -> float:
        return max(cut.greatest, cut.sum / cores)

    found, lower, upper = [start], start.greatest, cost(start)
    moves = cutter.within(upper)
    for bound in (lower, upper):
        if (cut := moves.smallest_sum(bound)) is not None:
            found.append(cut)
    least = found[-1].sum / cores  # no cut worth looking at has less work
    upper = min(map(cost, found))
    for _ in range(MOST_BOUNDS):
        if upper * (1 - TOLERANCE) <= max(lower, least):
            break
        middle = (lower + upper) / 2
        cut = moves.smallest_sum(middle)
        assert cut is not None, "the start is within every bound"
        found.append(cut)
        if cut.sum / cores > middle:  # and so it is with every smaller bound
            lower = middle
        upper = min(upper, cost(cut))
        if cut.sum / cores <= middle:
            upper = min(upper, middle)
    best = min(found, key=cost)
    others = tuple(cut for cut in dict.fromkeys(found) if cut.parts != best.parts)
    return BestCut(best, cost(best), min(cost(best), max(lower, least)), others)


def evenly(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Consecutive parts of which the heaviest is as light as can be: how many items each has."""
    running = np.concatenate([[0.0], np.cumsum(np.array(weights, float))])

    def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        own = running[stop] - running[first]
        return own, own

    found = smallest_greatest(CutProblem(len(weights), dict.fromkeys(range(1, parts + 1), (1,)), parts, running,
                                         {1: 1.0}, evaluate))
    assert found is not None, "there are as many items as parts"
    return tuple(part.stop - part.first for part in found.parts)
