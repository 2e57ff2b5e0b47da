"""Greedy list scheduling: whenever a rank is free, rules choose among the actions that it could do.

The scheduling is event-driven, over F, I and W. The search runs it under many rules and takes the best
(:mod:`vpipe.schedules.search.search`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush

from vpipe.schedules.assignment import Placement
from vpipe.schedules.costs import Costs
from vpipe.schedules.kinds import HALF, RECOMPUTED, SAVED, Action, Kind, Op, step

Turn = tuple[Kind, int]
"""An operation of a stage; its microbatch is the stage's next, since every stage takes them in order."""

SAME_TIME = 1e-9
"""A difference that counts as the same time, as a share of the longest action."""

ROUNDING = 1e-12
"""An excess over a memory limit that counts as rounding, as a share of it: less than a byte, whatever the limit."""


class Priority(Enum):
    """The operation that goes first where a forward and a backward are both possible."""

    BACKWARD = "backward"
    FORWARD = "forward"
    OTHER = "other"  # the one that was not the last


@dataclass(frozen=True)
class GreedyRules:
    """The rules by which a rank chooses."""

    # per rank, microbatch-stages that may be between their forward and the passing of their gradient
    in_flight: tuple[float, ...]
    held: tuple[float, ...]  # per rank, those together with the ones that wait for their weight half
    first: Priority = Priority.BACKWARD  # forward or backward
    deep: bool = True  # of several forwards that of the latest stage goes first, not that of the earliest
    patience: float = 0.0  # a weight half starts in a gap that is known to be shorter by at most this share of it
    split: bool = True  # backwards are split into halves
    # per rank, the order of forwards and backwards, where only the weight halves are free
    turns: tuple[tuple[Turn, ...], ...] | None = None


@dataclass(frozen=True)
class GreedyOrder:
    """An order with the longest time of a rank from its first start to its last end, on links without contention."""

    programs: tuple[tuple[Action, ...], ...]
    longest_s: float
    makespan_s: float


class OrderedWork:
    """The work to order, as plain lists of ``float``.

    Args:
        placement: the rank of every stage.
        microbatches: m.
        costs: of every stage.
        limits: per rank, bytes that it may hold.
    """

    def __init__(self, placement: Placement, microbatches: int, costs: Costs, limits: Sequence[float]) -> None:
        self.rank_of, self.microbatches = [group[0] for group in placement], microbatches
        self.ranks = max(self.rank_of) + 1
        self.stages_of = [[stage for stage, rank in enumerate(self.rank_of) if rank == wanted]
                          for wanted in range(self.ranks)]
        stages = costs.stages
        self.forward_s = [float(cost.forward_s) for cost in stages]
        self.input_s = [float(cost.input_s + cost.recompute_s) for cost in stages]
        self.weight_s = [float(cost.weight_s) for cost in stages]
        self.forward_bytes, self.recomputed_bytes, self.half_bytes = (
            [float(value.bytes(cost)) for cost in stages] for value in (SAVED, RECOMPUTED, HALF))
        self.activation_bytes = [float(cost.activation_bytes) for cost in stages]
        self.versions_bytes = [float(sum(stages[stage].version_bytes for stage in here)) for here in self.stages_of]
        self.limits = [limit * (1 + ROUNDING) - held for limit, held in zip(limits, self.versions_bytes, strict=True)]
        self.overlap = costs.overlap
        self.step_s = [float(sum(stages[stage].step_s for stage in here)) for here in self.stages_of]
        self.work_s = [step_s + microbatches * sum(self.forward_s[stage] + self.input_s[stage] + self.weight_s[stage]
                                                   for stage in here)
                       for step_s, here in zip(self.step_s, self.stages_of, strict=True)]

        # A microbatch goes through forwards and input halves in the only order in which it can: each feeds the next.
        numbers = range(len(placement))
        turns = [(Op.FORWARD, stage) for stage in numbers] + [(Op.INPUT, stage) for stage in reversed(numbers)]
        self.feeds: dict[Turn, Turn | None] = dict(zip(turns, [*turns[1:], None], strict=True))
        self.transfer_s = {op: [self._transfer_s(costs, op, stage) for stage in numbers]
                           for op in (Op.FORWARD, Op.INPUT)}
        self.down_s, self.up_s = self.transfer_s[Op.FORWARD], self.transfer_s[Op.INPUT]
        # A forward leaves room for the later stages of its rank; without it these could wait for ever.
        self.later = [sum(other > stage for other in self.stages_of[rank]) for stage, rank in enumerate(self.rank_of)]
        self.reserve = [self._room(self.stages_of[rank], stage) for stage, rank in enumerate(self.rank_of)]

    def _transfer_s(self, costs: Costs, op: Kind, stage: int) -> float:
        """Return the seconds from the end of an action until what it feeds can begin."""
        sizes = [value.carrier.transfer.bytes(costs.stages[stage]) for value, _ in op.makes
                 if value.carrier is not None and value.carrier.transfer is not None]
        source, fed = self.rank_of[stage], self.feeds[op, stage]
        target = source if fed is None else self.rank_of[fed[1]]
        return 0.0 if target == source else float(costs.link(source, target).transfer_s(sizes[0]))

    def _room(self, stages: Sequence[int], held: int = -1) -> float:
        """Return the bytes that one microbatch needs on ``stages`` of a rank after stage ``held``, not split."""
        room = needed = 0.0
        for stage in stages:
            if stage >= held:
                room += self.forward_bytes[stage] * (stage > held)
                needed = max(needed, room + self.recomputed_bytes[stage])
        return needed

    def goal(self) -> tuple[float, float]:
        """Return a span and a makespan (see :class:`GreedyOrder`) that no order can beat.

        Until a gradient is back a rank can do forwards only, and only as many as it can hold.
        """
        spans, ends = [], []
        for rank, stages in enumerate(self.stages_of):
            first, last = stages[0], stages[-1]
            return_s = (sum(self.forward_s[first:]) + sum(self.down_s[first:])  # from a forward until its gradient
                        + sum(self.input_s[last + 1:]) + sum(self.up_s[last + 1:]))
            forwards_s = self.microbatches * sum(self.forward_s[stage] for stage in stages)
            smallest = min(self.forward_bytes[stage] for stage in stages)
            if self.limits[rank] < math.inf and smallest > 0:
                forwards_s = min(forwards_s,
                                 self.limits[rank] // smallest * max(self.forward_s[stage] for stage in stages))
            spans.append(self.work_s[rank] + max(0.0, return_s - forwards_s))
            ends.append(sum(self.forward_s[:first]) + sum(self.down_s[:first]) + spans[-1])
        return max(spans), max(ends)

    def least_bytes(self, rank: int) -> float:
        """Return the smallest limit that ``rank`` can keep: one microbatch in flight, no backward split."""
        return self._room(self.stages_of[rank]) + self.versions_bytes[rank]


class GreedyRun:
    """One run of list scheduling, of ``work`` by ``rules``."""

    def __init__(self, work: OrderedWork, rules: GreedyRules) -> None:
        self._work, self._rules = work, rules
        stages, ranks = len(work.rank_of), work.ranks
        # Known arrival times of what the next forwards and input halves wait for.
        self._inputs: list[list[float]] = [[0.0] * work.microbatches, *([] for _ in range(stages - 1))]
        self._gradients: list[list[float]] = [[] for _ in range(stages)]
        self._arrivals = {Op.FORWARD: self._inputs, Op.INPUT: self._gradients}
        self._forwards, self._backwards, self._weights = [0] * stages, [0] * stages, [0] * stages  # how many started
        self._flying, self._halves = [0] * ranks, [deque[int]() for _ in range(ranks)]
        self._bytes = [0.0] * ranks
        self._last_op = [Op.INPUT] * ranks
        self._orders: list[list[Action]] = [[] for _ in range(ranks)]
        self._turns = [0] * ranks
        self._starts, self._free = [math.inf] * ranks, [0.0] * ranks
        self._same_s = SAME_TIME * max(1e-30, *work.forward_s, *work.input_s, *work.weight_s)
        self._events = [(0.0, rank) for rank in range(ranks)]  # a heap of times to look at a rank

    def order(self) -> GreedyOrder | None:
        """Return the order that the rules make of the work; None when it gets stuck."""
        while self._events:
            now, rank = heappop(self._events)
            if self._free[rank] <= now + self._same_s and (turn := self._choice(rank, now)) is not None:
                self._do(rank, now, *turn)
        if any(weights < self._work.microbatches for weights in self._weights):
            return None
        programs = tuple(tuple(_fused(order)) + tuple(step(stage, 0) for stage in stages)
                         for order, stages in zip(self._orders, self._work.stages_of, strict=True))
        ends = [free + step_s for free, step_s in zip(self._free, self._work.step_s, strict=True)]
        return GreedyOrder(programs, max(end - start for start, end in zip(self._starts, ends, strict=True)), max(ends))

    def _choice(self, rank: int, now: float) -> Turn | None:
        """Return what ``rank`` does now; None when it waits."""
        forward, backward, soonest, blocked = self._possible(rank, now)
        halves = self._halves[rank]
        first = self._rules.first
        turn = first is Priority.FORWARD or (first is Priority.OTHER and self._last_op[rank] is not Op.FORWARD)
        if forward is not None and (backward is None or turn):
            return Op.FORWARD, forward
        if blocked and halves and (backward is None or turn):
            return Op.WEIGHT, halves[0]
        if backward is not None:
            if not self._rules.split and not halves:
                return Op.BACKWARD, backward
            work = self._work
            if (self._bytes[rank] + work.recomputed_bytes[backward] - work.activation_bytes[backward]
                    + work.half_bytes[backward] <= work.limits[rank]):
                return Op.INPUT, backward
            return (Op.WEIGHT, halves[0]) if halves else (Op.BACKWARD, backward)
        if halves and soonest - now >= self._work.weight_s[halves[0]] * (1 - self._rules.patience) - self._same_s:
            return Op.WEIGHT, halves[0]
        return None

    def _possible(self, rank: int, now: float) -> tuple[int | None, int | None, float, bool]:
        """Return a stage for a forward, one for a backward, the next arrival, and whether only memory forbids one."""
        work, rules, by = self._work, self._rules, now + self._same_s
        forward = backward = None
        soonest, blocked = math.inf, False
        stages: Sequence[int] = work.stages_of[rank]
        ops: tuple[Kind, ...] = (Op.FORWARD, Op.INPUT)
        if rules.turns is not None:
            if self._turns[rank] == len(rules.turns[rank]):
                return None, None, math.inf, False
            op, stage = rules.turns[rank][self._turns[rank]]
            stages, ops = (stage,), (op,)
        for stage in stages:
            if Op.FORWARD in ops and self._forwards[stage] < len(self._inputs[stage]):
                arrival = self._inputs[stage][self._forwards[stage]]
                more, reserve = 1 + work.later[stage], work.reserve[stage]
                if rules.turns is not None:  # a fixed order is known to leave room
                    more, reserve = 1, 0.0
                if self._flying[rank] + more > rules.in_flight[rank]:
                    pass
                elif (self._flying[rank] + len(self._halves[rank]) + more > rules.held[rank]
                      or self._bytes[rank] + work.forward_bytes[stage] + reserve > work.limits[rank]):
                    blocked = blocked or arrival <= by
                elif arrival > by:
                    soonest = min(soonest, arrival)
                elif forward is None or rules.deep:
                    forward = stage
            if Op.INPUT in ops and self._backwards[stage] < len(self._gradients[stage]):
                arrival = self._gradients[stage][self._backwards[stage]]
                if arrival > by:
                    soonest = min(soonest, arrival)
                elif self._bytes[rank] + work.recomputed_bytes[stage] <= work.limits[rank]:
                    backward = stage
                else:
                    blocked = True
        return forward, backward, soonest, blocked

    def _do(self, rank: int, now: float, op: Kind, stage: int) -> None:
        work, end, transfer_s = self._work, now, 0.0
        self._starts[rank] = min(self._starts[rank], now)
        if op.uses_version:
            microbatch, end = self._forwards[stage], now + work.forward_s[stage]
            self._forwards[stage] += 1
        else:
            microbatch = (self._backwards if op.returns else self._weights)[stage]
            if op.returns:
                end += work.input_s[stage]
                self._backwards[stage] += 1
            if op.completes:
                end += work.weight_s[stage]
                self._weights[stage] += 1
        activations, halves = op.uses_version - op.returns, op.first_half - op.second_half
        self._flying[rank] += activations
        self._bytes[rank] += activations * work.forward_bytes[stage]
        self._bytes[rank] += halves * work.half_bytes[stage]
        if halves > 0:
            self._halves[rank].append(stage)
        elif halves < 0:
            self._halves[rank].popleft()
        if activations:
            made = Op.FORWARD if op.uses_version else Op.INPUT  # a whole backward feeds what its first half does
            transfer_s = work.transfer_s[made][stage]
            if (fed := work.feeds[made, stage]) is not None:
                self._arrivals[fed[0]][fed[1]].append(end + transfer_s)
                heappush(self._events, (end + transfer_s, work.rank_of[fed[1]]))
            self._last_op[rank] = op
            self._turns[rank] += 1
        self._orders[rank].append(Action(op, stage, microbatch))
        self._free[rank] = end if work.overlap else end + transfer_s
        heappush(self._events, (self._free[rank], rank))


def _fused(order: Sequence[Action]) -> list[Action]:
    """Fuse both halves of a backward of stage 0 where they follow each other: nobody waits for the first."""
    fused: list[Action] = []
    for action in order:
        is_weight = action.op is Op.WEIGHT and action.stage == 0
        if is_weight and fused and fused[-1] == Action(Op.INPUT, 0, action.index):
            fused[-1] = Action(Op.BACKWARD, 0, action.index)
        else:
            fused.append(action)
    return fused
