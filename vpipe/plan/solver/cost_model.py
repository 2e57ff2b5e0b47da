"""Estimate what a partition costs under a schedule: the figures that dynamic programming minimises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain
from operator import add

import numpy as np

from vpipe.plan.solver.choice import Choice
from vpipe.plan.solver.partition_search import (
    BestPartition,
    Floats,
    FoundPartition,
    Integers,
    PartitionProblem,
    StageRange,
    smallest_bottleneck,
    smallest_cost,
)
from vpipe.plan.solver.stage_table import StageDemand, StageTable
from vpipe.plan.stage_costs import versions_s


class CostModel:
    """The costs of a profile's stages under a schedule.

    With a flush a step takes the sum, over stages, of the time of a microbatch in each, plus the time that the slowest
    stage adds with its other microbatches and its optimizer step. Without a flush a microbatch takes as long as in the
    slowest stage. Where ranks share cores a step takes at least all the work, divided by the cores.

    Args:
        table: of the profile.
        choice: of schedule, microbatches and replicas.
        shares: for all stages or per stage, the share of its layers that must be recomputed; per stage only where the
            number of ranks of a stage and the later ones determines which stage it is.
        partition: layers per stage, where they are fixed.
    """

    def __init__(self, table: StageTable, choice: Choice, shares: Sequence[float] | float | None = None,
                 partition: Sequence[int] | None = None) -> None:
        self.table, self.choice, self._shares, ranks = table, choice, shares, choice.ranks
        self._partition = partition
        self._widths: dict[int, Sequence[int]]  # by ranks of a stage and the later ones, the replicas that it may have
        if choice.placement is None:
            # A replica with one microbatch pipelines nothing; a whole model on every rank is a choice of its own.
            most = max(1, choice.microbatches // 2) if choice.flush else ranks
            self._widths = {ranks_left: range(1, min(ranks_left, most) + 1) for ranks_left in range(1, ranks + 1)}
        else:
            sizes = list(map(len, choice.placement))
            self._widths = {ranks - end + width: (width,) for end, width in zip(accumulate(sizes), sizes, strict=True)}
        self._order = list(chain.from_iterable(choice.placement or [range(ranks)]))  # of the ranks, by stage
        self._stage_of = {ranks_left: stage for stage, ranks_left in enumerate(sorted(self._widths, reverse=True))}
        profile = table.profile
        hosts = -(-ranks // max(1, profile.identity.ranks_per_host))
        self._cores = np.inf if profile.cores is None else min(ranks, profile.cores * hosts)

    def demand(self, ranks_left: int, width: int) -> StageDemand:
        """Return what a replica of a stage must hold that has ``ranks_left`` ranks together with the later ones."""
        share = self._shares
        if share is not None and not isinstance(share, (int, float)):
            share = share[self._stage_of[ranks_left]]
        return self.choice.demand(ranks_left, width)._replace(share=share, width=self.table.profile.sharers(width))

    def demands(self, stages: Iterable[StageRange]) -> Iterator[tuple[StageRange, StageDemand]]:
        """Yield the stages of a partition with what a replica of each must hold."""
        ranks_left = self.choice.ranks
        for each in stages:
            yield each, self.demand(ranks_left, each.width)
            ranks_left -= each.width

    @cached_property
    def by_time(self) -> PartitionProblem:
        """The problem of the least time."""
        choice, all_widths = self.choice, {width for several in self._widths.values() for width in several}
        least_step = self.table.sums["step"] / self.table.profile.sharers(max(all_widths))
        if not choice.flush:
            least, room = self._plain + least_step / choice.every, {w: float(w) for w in all_widths}
        else:
            most = max(choice.per_replica(width) for width in all_widths) - 1
            least = self._plain + (least_step / most if most else 0.0)
            room = {w: 1 / (choice.per_replica(w) - 1) if choice.per_replica(w) > 1 else np.inf for w in all_widths}
        return PartitionProblem(self.table.layers, self._widths, choice.ranks, least, room, self._evaluate,
                                self._partition)

    @cached_property
    def by_memory(self) -> PartitionProblem:
        """The problem of the least memory of the fullest rank."""
        def evaluate(ranks_left: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
            return np.zeros(first.shape), self.table.least_bytes(first, stop, self.demand(ranks_left, width))

        return PartitionProblem(self.table.layers, self._widths, self.choice.ranks, self.table.floor_bytes,
                          {w: 1.0 for several in self._widths.values() for w in several}, evaluate, self._partition)

    @cached_property
    def _plain(self) -> Floats:
        return self.table.work_s(self.choice.traits.split)

    def plain_s(self, first: Integers, stop: Integers) -> Floats:
        """Return the seconds of a microbatch in the layers of stages, without recomputation."""
        return self._plain[stop] - self._plain[first]

    def _work_s(self, first: Integers, stop: Integers, demand: StageDemand) -> Floats:
        """Return the seconds of a microbatch in stages; infinite for those that do not fit."""
        cuts = (first > 0).astype(float) + (stop < self.table.layers)
        backwards = stop > self.table.profile.frozen_layers  # others only go forward
        actions = (1 + backwards) * (1 + cuts) + backwards * self.choice.traits.split
        again = self.table.recompute_s(first, stop, demand)
        again = np.where(backwards | np.isinf(again), again, 0.0)
        work: Floats = self.plain_s(first, stop) + self.table.profile.dispatch_s * (actions + (again > 0)) + again
        return work

    def _step_s(self, first: Integers, stop: Integers, demand: StageDemand) -> Floats:
        """Return the seconds of an optimizer step of stages."""
        profile, steps = self.table.profile, self.table.sums["step"]
        later_s: Floats = versions_s(profile, self.table.parameter_bytes(first, stop), demand.versions)
        return (steps[stop] - steps[first]) / demand.width + profile.dispatch_s + later_s

    def _evaluate(self, ranks_left: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        """Evaluate stages by time, see :data:`~vpipe.plan.solver.partition_search.Evaluate`."""
        choice, demand = self.choice, self.demand(ranks_left, width)
        work, step = self._work_s(first, stop, demand), self._step_s(first, stop, demand)
        transfer = self._transfers_s(ranks_left - width)[stop]
        summing = self._sum_s(first, stop, width)
        per_microbatch = work + transfer if choice.traits.tight and choice.warmup != "auto" else work
        if not choice.flush:
            return work + step / choice.every, (per_microbatch + (step + summing) / choice.every) / width
        weight, halves = self.table.sums["weight_half"], choice.traits.filling_halves
        alone = np.maximum(0.0, work - halves * (weight[stop] - weight[first])) if halves else work
        slowest = choice.per_replica(width) * per_microbatch + step + summing - np.where(np.isinf(work), 0.0, alone)
        return alone + transfer, slowest

    def _evaluate_work(self, ranks_left: int, width: int, first: Integers, stop: Integers) -> tuple[Floats, Floats]:
        """Evaluate stages with all the work of a step as their sum."""
        return self._step_work_s(width, first, stop, self.demand(ranks_left, width)), \
            self._evaluate(ranks_left, width, first, stop)[1]

    def _step_work_s(self, width: int, first: Integers, stop: Integers, demand: StageDemand) -> Floats:
        """Return the seconds of computation of stages in a step, over all replicas."""
        return self.choice.indices * self._work_s(first, stop, demand) + width * self._step_s(first, stop, demand)

    def _with_costs(self, stages: tuple[StageRange, ...]) -> FoundPartition:
        """Return a partition with its costs by time."""
        ranks_left, total, bottleneck = self.choice.ranks, 0.0, 0.0
        for first, stop, width in stages:
            sums, costs = self._evaluate(ranks_left, width, np.array([first]), np.array([stop]))
            total, bottleneck = total + float(sums[0]), max(bottleneck, float(costs[0]))
            ranks_left -= width
        return FoundPartition(total, bottleneck, stages)

    def _transfers_s(self, ranks_left: int) -> Floats:
        """Return per boundary between layers the seconds of a microbatch to the next stage and of its gradient back."""
        if not ranks_left:
            return np.zeros(self.table.layers + 1)
        source, target = self._order[-ranks_left - 1], self._order[-ranks_left]
        profile = self.table.profile
        there, back = (profile.links.get(ends, profile.default_link) for ends in ((source, target), (target, source)))
        backwards = np.arange(self.table.layers + 1) > profile.frozen_layers
        return (there.latency_s + self.table.forward_bytes / there.bytes_per_s
                + backwards * (back.latency_s + self.table.gradient_bytes / back.bytes_per_s))

    def _sum_s(self, first: Integers, stop: Integers, width: int) -> Floats:
        """Return the seconds in which the replicas of stages sum their gradients."""
        if width == 1:
            return np.zeros(first.shape)
        link, sums = self.table.profile.default_link, stop > self.table.profile.frozen_layers
        return 2 * (sums * link.latency_s
                    + (width - 1) / width * self.table.parameter_bytes(first, stop) / link.bytes_per_s)

    def cost(self, found: FoundPartition) -> float:
        """Return the seconds of a step with a flush, of a microbatch without."""
        if not self.choice.flush:
            return max(found.bottleneck, found.sum / self._cores)
        if np.isinf(self._cores):
            return found.sum + found.bottleneck
        work = sum(self._step_work_s(width, np.array([first]), np.array([stop]), demand)[0]
                   for (first, stop, width), demand in self.demands(found.stages))
        return max(found.sum + found.bottleneck, float(work / self._cores))

    def best(self) -> BestPartition | None:
        """Return the partition that costs least; None when nothing fits."""
        table, choice = self.table, self.choice
        limit = np.inf if table.limit_bytes is None else table.limit_bytes
        if self.by_memory.lower_bound() > limit:
            return None
        start = smallest_bottleneck(self.by_time, lambda: np.isfinite(limit) and (
            (needed := self.least_memory()) is None or needed.bottleneck > limit))
        if start is None:
            return None
        if not choice.flush:
            return smallest_cost(self.by_time, start, self.cost, lambda total, most: max(most, total / self._cores),
                                 self.cost(start), start.bottleneck)
        filled = choice.traits.filling_halves * float(table.sums["weight_half"][-1])
        least = max(0.0, float(self._plain[-1]) - filled)
        lower_bound, widest = start.bottleneck, max(start.bottleneck, self.cost(start) - least)  # both are rounded
        if np.isinf(self._cores):
            return smallest_cost(self.by_time, start, self.cost, add, widest, lower_bound)
        least_work = replace(self.by_time, evaluate=self._evaluate_work).within(widest).smallest_sum(widest)
        assert least_work is not None, "the start is among them"
        best = smallest_cost(self.by_time, start, self.cost, add, widest,
                             max(lower_bound, least_work.sum / self._cores))
        other = self._with_costs(least_work.stages)
        if self.cost(other) < best.cost:
            best = BestPartition(other, self.cost(other), best.lower_bound, (best.found, *best.others))
        return best

    def peak_bytes(self, stages: Iterable[StageRange]) -> int:
        """Return what the fullest rank of a partition holds when nothing is recomputed."""
        return max(self.table.peak_bytes(each.first, each.stop, demand, frozenset())
                   for each, demand in self.demands(stages))

    def least_memory(self) -> FoundPartition | None:
        """Return the partition whose fullest rank holds least; None when there are fewer layers than stages."""
        return smallest_bottleneck(self.by_memory)

    def seconds_per_sample(self, cost: float) -> float:
        """Return the seconds per sample of a partition that costs so much."""
        size = self.table.profile.identity.microbatch_size
        return cost / (size * self.choice.microbatches if self.choice.flush else size)
