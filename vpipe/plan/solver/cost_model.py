"""What a cut costs under a schedule, by formula: the numbers that dynamic programming minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.profile import LinkProfile
from vpipe.plan.solver.partition_search import (
    BestCut,
    Cut,
    CutProblem,
    StageSlice,
    smallest_cost,
    smallest_greatest,
    smallest_greatest_or_share,
)
from vpipe.plan.solver.schedule_model import ScheduleModel
from vpipe.plan.solver.stage_table import StageDemand, StageTable

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class CostModel:
    """A profile under a schedule.

    With a flush a step takes the sum, over stages, of the time that a microbatch is in each, plus what the slowest adds
    with the others of its microbatches and its optimizer step. Without one a microbatch takes as long as in the slowest
    stage. Where ranks share cores it takes at least all the work, divided by the cores.

    Args:
        spans: of the profile.
        form: the schedule.
        widths: by ranks in and behind a stage, the replicas it may have.
        ranks: their numbers in the order of the stages.
        shares: per stage, the share of its layers that must be recomputed; only where its number follows from the
            ranks behind it.
        partition: layers per stage, where they are told.
    """

    def __init__(self, spans: StageTable, form: ScheduleModel, widths: Mapping[int, Sequence[int]],
                 ranks: Sequence[int], shares: Sequence[float] | float | None = None,
                 partition: Sequence[int] | None = None) -> None:
        self.spans, self.form, self._widths, self._ranks, self._shares = spans, form, widths, ranks, shares
        self._stage_of = {behind: stage for stage, behind in enumerate(sorted(widths, reverse=True))}
        self._stop_of: Integers | None = None  # of the told stage that begins with a layer; 0 where none does
        if partition is not None:
            stops = np.cumsum(partition)
            self._stop_of = np.zeros(spans.layers, int)
            self._stop_of[stops - partition] = stops
        profile = spans.profile
        here = profile.identity.ranks_per_host
        hosts = -(-form.ranks // max(1, here))
        self._cores = np.inf if profile.cores is None else min(form.ranks, profile.cores * hosts)

    def demand(self, behind: int, width: int) -> StageDemand:
        """What a replica of a stage holds."""
        share = self._shares
        if share is not None and not isinstance(share, (int, float)):
            share = share[self._stage_of[behind]]
        return self.form.demand(behind, width)._replace(share=share)

    @cached_property
    def cutter(self) -> CutProblem:
        """For the least time."""
        form, all_widths = self.form, {width for several in self._widths.values() for width in several}
        if not form.flush:
            floor, room = self._plain + self.spans.running("step") / form.every, {w: float(w) for w in all_widths}
        else:
            most = max(form.per_replica(width) for width in all_widths) - 1
            floor = self._plain + (self.spans.running("step") / most if most else 0.0)
            room = {w: 1 / (form.per_replica(w) - 1) if form.per_replica(w) > 1 else np.inf for w in all_widths}
        return CutProblem(self.spans.layers, self._widths, form.ranks, floor, room, self._evaluate)

    @cached_property
    def by_memory(self) -> CutProblem:
        """For the least memory of the fullest rank."""
        def evaluate(behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
            hold = self.demand(behind, width)
            return np.zeros(first.shape), self._told(
                first, stop, lambda first, stop: self.spans.least_bytes(first, stop, hold))

        return CutProblem(self.spans.layers, self._widths, self.form.ranks, self.spans.floor_bytes,
                          {w: 1.0 for several in self._widths.values() for w in several}, evaluate)

    @cached_property
    def _plain(self) -> Floats:
        """Running sum of the seconds of a microbatch, nothing recomputed."""
        parts = ("forward", "input", "weight") if self.form.traits.split else ("forward", "backward")
        total: Floats = np.sum([self.spans.running(part) for part in parts], axis=0)
        return total

    def work_s(self, first: Integers, stop: Integers, hold: StageDemand) -> Floats:
        """What stages do for a microbatch; infinite for those that do not fit or are not told."""
        cuts = (first > 0).astype(float) + (stop < self.spans.layers)
        actions = 2 * (1 + cuts) + self.form.traits.split
        again = self._told(first, stop, lambda first, stop: self.spans.recompute_s(first, stop, hold))
        dispatch_s = self.spans.profile.dispatch_s
        return self._plain[stop] - self._plain[first] + dispatch_s * (actions + (again > 0)) + again

    def plain_s(self, first: Integers, stop: Integers) -> Floats:
        """What the layers of stages take for a microbatch when nothing is recomputed."""
        return self._plain[stop] - self._plain[first]

    def step_s(self, first: Integers, stop: Integers, hold: StageDemand) -> Floats:
        """One optimizer step of stages."""
        profile, steps = self.spans.profile, self.spans.running("step")
        copying = hold.versions > 1 and profile.copy_bytes_per_s
        copying_s = self.spans.parameter_bytes(first, stop) / profile.copy_bytes_per_s if copying else 0.0
        return steps[stop] - steps[first] + profile.dispatch_s + copying_s

    def _told(self, first: Integers, stop: Integers, of: Callable[[Integers, Integers], Floats]) -> Floats:
        """Something of stages, infinite for those that are not the told ones."""
        if self._stop_of is None:
            return of(first, stop)
        found, told = np.full(first.shape, np.inf), self._stop_of[first] == stop
        if told.any():
            found[told] = of(first[told], stop[told])
        return found

    def _evaluate(self, behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        form = self.form
        hold = self.demand(behind, width)
        work, step = self.work_s(first, stop, hold), self.step_s(first, stop, hold)
        passed = self._transfers_s(behind - width)[stop]
        summed = self._sum_s(first, stop, width)
        held_up = work + passed if form.traits.tight else work
        if not form.flush:
            return work + step / form.every, (held_up + (step + summed) / form.every) / width
        weight = self.spans.running("weight")
        filled = form.traits.filling_halves * (weight[stop] - weight[first])
        alone = np.maximum(0.0, work - filled) if form.traits.filling_halves else work
        return alone + passed, form.per_replica(width) * held_up + step + summed - np.where(np.isinf(work), 0.0, alone)

    def _work(self, behind: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        """As :meth:`_evaluate`, but the sum is all the work of a step."""
        hold = self.demand(behind, width)
        work = self.form.microbatches * self.work_s(first, stop, hold) + width * self.step_s(first, stop, hold)
        return work, self._evaluate(behind, width, first, stop)[1]

    def _cut(self, parts: tuple[StageSlice, ...]) -> Cut:
        """What a cut costs."""
        behind, total, greatest = self.form.ranks, 0.0, 0.0
        for first, stop, width in parts:
            sums, costs = self._evaluate(behind, width, np.array([first]), np.array([stop]))
            total, greatest = total + float(sums[0]), max(greatest, float(costs[0]))
            behind -= width
        return Cut(total, greatest, parts)

    def _transfers_s(self, behind: int) -> Floats:
        """Per cut, what a microbatch takes to the next stage and its gradient back."""
        if not behind:
            return np.zeros(self.spans.layers + 1)
        source, target = self._ranks[-behind - 1], self._ranks[-behind]
        there, back = self._link(source, target), self._link(target, source)
        return (there.latency_s + self.spans.forward_bytes / there.bytes_per_s
                + back.latency_s + self.spans.gradient_bytes / back.bytes_per_s)

    def _sum_s(self, first: Integers, stop: Integers, width: int) -> Floats:
        """What the replicas of a stage take to sum their gradients."""
        if width == 1:
            return np.zeros(first.shape)
        link = self.spans.profile.default_link
        return 2 * (link.latency_s + (width - 1) / width * self.spans.parameter_bytes(first, stop) / link.bytes_per_s)

    def _link(self, source: int, target: int) -> LinkProfile:
        return self.spans.profile.links.get((source, target), self.spans.profile.default_link)

    def cost(self, cut: Cut) -> float:
        """Of a step with a flush, of a microbatch without: the seconds."""
        if not self.form.flush:
            return max(cut.greatest, cut.sum / self._cores)
        return max(cut.sum + cut.greatest, self._shared(cut.parts))

    def _shared(self, parts: Sequence[StageSlice]) -> float:
        """All the work, divided by the cores."""
        if np.isinf(self._cores):
            return 0.0
        total, behind, form = 0.0, self.form.ranks, self.form
        for first, stop, width in parts:
            stage, hold = (np.array([first]), np.array([stop])), self.demand(behind, width)
            total += form.microbatches * self.work_s(*stage, hold)[0] + width * self.step_s(*stage, hold)[0]
            behind -= width
        return float(total / self._cores)

    def best(self) -> BestCut | None:
        """The cut that costs least; None when nothing fits."""
        spans, form = self.spans, self.form
        limit = np.inf if spans.limit_bytes is None else spans.limit_bytes
        if self.by_memory.least() > limit:
            return None
        start = smallest_greatest(self.cutter, lambda: np.isfinite(limit) and (
            (needed := self.least_bytes()) is None or needed.greatest > limit))
        if start is None:
            return None
        if not form.flush:
            return smallest_greatest_or_share(self.cutter, start, self._cores)
        least = max(0.0, float(self._plain[-1]) - form.traits.filling_halves * float(spans.running("weight")[-1]))
        floor, widest = start.greatest, self.cost(start) - least
        if np.isinf(self._cores):
            return smallest_cost(self.cutter, start, self.cost, least, floor)
        leanest = replace(self.cutter, evaluate=self._work).within(widest).smallest_sum(widest)
        assert leanest is not None, "the start is among them"
        best = smallest_cost(self.cutter, start, self.cost, least, max(floor, leanest.sum / self._cores))
        if self.cost(lean := self._cut(leanest.parts)) < best.cost:
            best = BestCut(lean, self.cost(lean), best.bound, (best.cut, *best.others))
        return best

    def peak_bytes(self, partition: Sequence[int], widths: Sequence[int]) -> int:
        """What the fullest rank of a partition holds when nothing is recomputed."""
        behind, first, most = self.form.ranks, 0, 0
        for size, width in zip(partition, widths, strict=True):
            hold = self.demand(behind, width)
            most = max(most, self.spans.peak_bytes(first, first + size, hold, frozenset()))
            first, behind = first + size, behind - width
        return most

    def least_bytes(self) -> Cut | None:
        """The cut of which the fullest rank holds least; None when there are fewer layers than stages."""
        return smallest_greatest(self.by_memory)

    def seconds_per_sample(self, cost: float) -> float:
        """Of a cut that costs so much."""
        size = self.spans.profile.identity.microbatch_size
        return cost / (size * self.form.microbatches if self.form.flush else size)
