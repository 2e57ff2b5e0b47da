"""Search the best order for given costs and a limit on memory.

The search runs greedy list scheduling of the zero-bubble kind (Qi et al., arXiv:2401.10241, section 3.1; Controllable
Memory, arXiv:2405.15362) under many rules, then climbs from the best of them. Every registered schedule of fixed order
competes, as it is and with its weight halves moved to where its ranks wait. So the result is at least as good as any
of them that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter

from vpipe.errors import CheckError, UserError, counted
from vpipe.schedules.assignment import Layout, Placement, Size
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, Number
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.registry import Limits, RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.search.greedy import ROUNDING, SAME_TIME, GreedyRules, GreedyRun, OrderedWork, Priority
from vpipe.schedules.simulator.timeline import simulate

Score = tuple[Number, Number, Number, int]
"""Less is better: bubble, makespan, peaks of all ranks together, number of actions (a split backward is two)."""

_ACTIONS = 40_000
"""Actions that all rules together place before the best of them are tried on the whole batch: about 0.2 s."""

_FINALISTS = 4
"""Greedy orders that are simulated; the greedy's own times leave out that transfers queue on a link."""

_SHARES_OF_WARM_UP = (0.25, 0.4, 0.5, 0.65, 0.8, 1.0, 1.25, 1.6, math.inf)
"""Forwards before a rank's first backward, as a share of those for which it has time: ZB-H1 has half, ZB-H2 all."""

_IN_FLIGHT_PER_RANK = (0.5, 0.67, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Microbatches in flight on every rank alike, divided by the number of ranks: 1 for ZB-V."""


def search(placement: Placement | int, microbatches: int,
           costs: Costs | Callable[[Placement], Costs] | None = None, limits: Limits = None, *,
           chunks: int | None = None) -> Schedule:
    """Return the best order over a placement for one batch: the smallest bubble, and of those the shortest.

    Its bubble is at most that of any schedule of fixed order that runs on this placement and keeps the limits.

    Args:
        placement: one rank per stage, any; or the number of ranks, which hold their stages in a loop or a zigzag.
        costs: by default F, I and W take one unit on every rank, and transfers no time. Of a function of the placement,
            each of several stages can take its share of a rank's time and memory.
        limits: of what a rank holds. Without ``costs``, the activations of any stage count 1, also those of a stage
            that is half as long because a rank has two.
        chunks: stages per rank, where their number is given; one or two when None.

    Raises:
        UserError: no order keeps the limits, or the costs or limits are for another placement.
    """
    placements = [placement] if not isinstance(placement, int) else list(dict.fromkeys(
        layout(placement, count) for count in ((1, 2) if chunks is None else (chunks,))
        for layout in (Layout.ZIGZAG, Layout.LOOP)))
    found: list[tuple[Score, Schedule]] = []
    problems: list[UserError] = []
    for one in placements:
        try:
            found += _Problem(one, microbatches, costs(one) if callable(costs) else costs, limits).candidates()
        except UserError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return min(found, key=itemgetter(0))[1]


class _Problem:
    """The checked arguments of :func:`search`."""

    def __init__(self, placement: Placement, microbatches: int, costs: Costs | None, limits: Limits) -> None:
        ranks = len({rank for group in placement for rank in group})
        if not placement or microbatches < 1:
            raise UserError(f"{counted(len(placement), 'stage')} and {counted(microbatches, 'microbatch')}",
                            hint="a pipeline needs at least one of each")
        self._placement, self._microbatches = placement, microbatches
        self._costs = costs or Costs.uniform(Size(ranks, microbatches, max(1, len(placement) // ranks), microbatches))
        if len(self._costs.stages) != len(placement):
            raise UserError(f"there are costs for {len(self._costs.stages)} stages, but the placement has "
                            f"{len(placement)}", hint="give one entry per stage")
        each: Sequence[Number | None] = limits if isinstance(limits, Sequence) else [limits] * ranks
        if len(each) != ranks:
            raise UserError(f"there are {len(each)} memory limits for {ranks} ranks",
                            hint="give one per rank, or one number for all")
        self._limits: list[Number] = [math.inf if limit is None else limit for limit in each]
        self._whole = work = self._work(microbatches)
        self._unlimited = GreedyRules((math.inf,) * ranks, (math.inf,) * ranks)
        self._goal = work.goal()
        least = [work.least_bytes(rank) for rank in range(work.ranks)]
        short = [rank for rank, limit in enumerate(self._limits) if limit < least[rank] * (1 - ROUNDING)]
        if short:
            rank = max(short, key=lambda rank: least[rank] - self._limits[rank])
            raise UserError(f"no order keeps the memory limit of {float(self._limits[rank]):g} on rank {rank}: one "
                            f"microbatch alone holds {least[rank]:g} there",
                            hint="allow " + ", ".join(f"{least[rank]:g} or more on rank {rank}" for rank in short)
                            + ", use smaller microbatches, or let stages recompute")

    def _work(self, microbatches: int) -> OrderedWork:
        return OrderedWork(self._placement, microbatches, self._costs, [float(limit) for limit in self._limits])

    def candidates(self) -> Iterator[tuple[Score, Schedule]]:
        """Yield the orders that keep the limits, with their scores."""
        hand_made = list(self._hand_made())
        scored = [one for schedule in hand_made if (one := self._scored(schedule.programs)) is not None]
        yield from scored
        if any(self._is_optimal(score) for score, _ in scored):
            return
        any_fits = bool(scored)
        for rules in self._finalists(hand_made):
            if (found := self._ordered(rules)) is not None:
                any_fits = True
                yield found
                if self._is_optimal(found[0]):
                    return
        # One microbatch in flight and no backward split keep every limit that can be kept.
        one_by_one = replace(self._unlimited, split=False,
                             in_flight=tuple(float(len(stages)) for stages in self._whole.stages_of))
        if not any_fits and (last := self._ordered(one_by_one)) is not None:
            yield last

    def _is_optimal(self, score: Score) -> bool:
        """Return whether no order has a smaller bubble or a smaller makespan."""
        return _reaches((float(score[0]) + max(self._whole.work_s), float(score[1])), self._goal)

    def _ordered(self, rules: GreedyRules) -> tuple[Score, Schedule] | None:
        found = GreedyRun(self._whole, rules).order()
        return None if found is None else self._scored(found.programs)

    def _scored(self, programs: Sequence[Sequence[Action]]) -> tuple[Score, Schedule] | None:
        """Simulate programs as the schedule ``auto``, with its peaks as bounds; None when it does not keep the limits.
        """
        schedule = Schedule("auto", self._placement, tuple(map(tuple, programs)), self._microbatches,
                            self._microbatches, True, (), (1,) * len(self._placement), {})
        try:
            timeline = simulate(schedule, self._costs)
        except CheckError:
            return None  # somebody's registered schedule that cannot run
        if any(peak > limit * (1 + ROUNDING) for peak, limit in zip(timeline.peak_bytes, self._limits, strict=True)):
            return None
        peaks = tuple(rank.peak_activations for rank in schedule.rank_peaks)
        return ((timeline.bubble_s, timeline.makespan_s, sum(timeline.peak_bytes, start=0),
                 sum(map(len, programs))), replace(schedule, peak_activations=peaks))

    def _hand_made(self) -> Iterator[Schedule]:
        for name in RegisteredSchedule.names():
            registered = RegisteredSchedule.find(name)
            if registered is not None and registered.flush and registered.search is None:
                try:
                    yield build(name, self._placement, self._microbatches)
                except UserError:
                    continue  # not on this placement, or not with so many

    def _finalists(self, hand_made: Sequence[Schedule]) -> Iterator[GreedyRules]:
        """Yield the rules to run on the whole batch.

        The first are the best of many, found in a trial on few microbatches. The others keep the order of forwards and
        backwards of a hand-made schedule.
        """
        rules = list(_rules(self._whole))
        few = max(2 * self._whole.ranks, _ACTIONS // (3 * len(self._placement) * len(rules)))
        trial = _Trial(self._whole if few >= self._microbatches else self._work(few))
        trial.run(rules)
        for one in trial.best():
            trial.run([replace(one, deep=not one.deep), replace(one, patience=1.0 - one.patience),
                       replace(one, split=not one.split)])
        trial.climb()
        yield from trial.best()
        for schedule in hand_made:
            yield replace(self._unlimited, turns=tuple(
                tuple((Op.FORWARD if action.op.uses_version else Op.INPUT, action.stage) for action in program
                      if action.op.uses_version or action.op.returns) for program in schedule.programs))


def _rules(work: OrderedWork) -> Iterator[GreedyRules]:
    """Yield the rules to try first, each once, from the lowest limits of what a rank holds to the highest."""
    for in_flight, held in sorted(set(_allowances(work)), key=lambda one: (sum(one[1]), sum(one[0]), one)):
        for first in Priority:
            yield GreedyRules(in_flight, held, first)


def _allowances(work: OrderedWork) -> Iterator[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Yield limits of microbatch-stages in flight, and held in all, per rank."""
    chunks = [len(stages) for stages in work.stages_of]
    most = [count * work.microbatches for count in chunks]
    endless = (math.inf,) * work.ranks
    for share in _SHARES_OF_WARM_UP:
        ahead = tuple(float(min(limit, count + _ahead(work, stages[0], share)))
                      for limit, count, stages in zip(most, chunks, work.stages_of, strict=True))
        yield ahead, endless
        yield ahead, (max(ahead),) * work.ranks
    for share in _IN_FLIGHT_PER_RANK:
        level = tuple(float(min(limit, max(count, math.ceil(share * count * work.ranks))))
                      for limit, count in zip(most, chunks, strict=True))
        yield level, endless
        yield endless, level


def _ahead(work: OrderedWork, stage: int, share: float) -> float:
    """Return ``share`` of the forwards for which ``stage`` has time until its first gradient comes back."""
    away = (sum(work.forward_s[stage + 1:]) + sum(work.input_s[stage + 1:]) + sum(work.down_s[stage:])
            + sum(work.up_s[stage + 1:]))
    if share == math.inf or not work.forward_s[stage]:
        return math.inf
    return math.ceil(share * away / work.forward_s[stage] * (1 - SAME_TIME))


def _reaches(times: tuple[float, float], goal: tuple[float, float]) -> bool:
    return times[0] <= goal[0] * (1 + SAME_TIME) and times[1] <= goal[1] * (1 + SAME_TIME)


class _Trial:
    """A trial of rules: the times of their orders. It ends as soon as no order can be better."""

    def __init__(self, work: OrderedWork) -> None:
        self._work, self._goal = work, work.goal()
        self._times: dict[GreedyRules, tuple[float, float]] = {}
        self._found_optimum = False

    def run(self, rules: Iterable[GreedyRules]) -> None:
        for one in rules:
            if self._found_optimum:
                return
            found = GreedyRun(self._work, one).order()
            self._times[one] = (math.inf, math.inf) if found is None else (found.longest_s, found.makespan_s)
            self._found_optimum = _reaches(self._times[one], self._goal)

    def best(self) -> list[GreedyRules]:
        """Return a few rules, the best first."""
        ranked = sorted(self._times, key=self._times.__getitem__)[:_FINALISTS]
        return [one for one in ranked if self._times[one][0] < math.inf]

    def climb(self) -> None:
        """Change the best rules: one more or one less in flight on one rank after the other, as long as that helps."""
        left = _ACTIONS // (3 * len(self._work.rank_of) * self._work.microbatches)
        before: list[GreedyRules] = []
        while (best := self.best()[:1]) != before:
            before = best
            for rank, more in product(range(self._work.ranks), (1, -1)):
                if left <= 0:
                    return
                left -= 1
                self.run([replace(one, in_flight=(*one.in_flight[:rank], one.in_flight[rank] + more,
                                                  *one.in_flight[rank + 1:])) for one in self.best()[:1]])
