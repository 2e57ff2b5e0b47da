"""A building block: when every rank of a V does the six actions of one microbatch; repeated, it is a schedule.

F, I and W of a stage count as one unit each, so a rank, which holds two stages, begins a microbatch every six units.
Within a block the four chains - forward down and up, input half down and up - take a fixed number of units from rank to
rank, their stride. How long a microbatch stays, and with it how many are there at once, follows from the strides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from vpipe.schedules.action import Action, Op, step, weight_half
from vpipe.schedules.size import Layout

PERIOD = 6

Timed = tuple[int, Action]
"""An action with the unit at which its block has it."""


@dataclass(frozen=True)
class Block:
    """A V of strides.

    Attributes:
        strides: units from rank to rank of F on chunk 0, F on chunk 1, I on chunk 1, I on chunk 0.
        gaps: units between two chains, before the second, the third and the fourth; such that no two actions of a
            rank fall on the same unit modulo :data:`PERIOD`.
    """

    strides: tuple[int, int, int, int]
    gaps: tuple[int, int, int]

    def times(self, rank: int, ranks: int) -> list[int]:
        """When ``rank`` does F and I of one microbatch on its chunks, in the order of the chains, and W on 1 and 0."""
        times, start = [], 0
        for chain, (stride, gap) in enumerate(zip(self.strides, (*self.gaps, 0), strict=True)):
            hops = ranks - 1 - rank if chain % 2 else rank  # the odd chains lead from the last rank to the first
            times.append(start + stride * hops)
            start += stride * (ranks - 1) + 1 + gap
        one, other = {*range(PERIOD)} - {time % PERIOD for time in times}
        free = [[done + 1 + (unit - done - 1) % PERIOD for done, unit in zip(times[2:], units, strict=True)]
                for units in ((one, other), (other, one))]
        return times + min(free, key=sum)


@lru_cache(maxsize=8)
def repeated(block: Block, ranks: int, microbatches: int, most: int) -> tuple[tuple[Action, ...], ...]:
    """The program of every rank: the block repeated, then squeezed at both ends.

    Every action is done as soon as it can be, in the order of the repeated block, but weight halves fill units in which
    the rank would idle, and behind a rank's last forward they let input halves go first.

    Args:
        most: microbatch-stages between F and W at which a rank begins no other.
    """
    lines = [_Line(block.times(rank, ranks), rank, ranks, microbatches) for rank in range(ranks)]
    made: dict[tuple[Op, int, int], int] = {}  # when an action's result is there
    now = 0
    while any(line.ahead or line.waiting for line in lines):
        for line in lines:
            action = line.next(made, now, most)
            if action is not None:
                line.take(action)
                made[action.op, action.stage, action.microbatch] = now + 1
        now += 1
    return tuple((*line.program, *(step(stage, 0) for stage in line.stages)) for line in lines)


class _Line:
    """A rank at work: what it has done, and what is ahead."""

    def __init__(self, times: Sequence[int], rank: int, ranks: int, microbatches: int) -> None:
        self.stages = [Layout.ZIGZAG.stage_of(rank, chunk, ranks) for chunk in (0, 1)]
        down, up = self.stages
        chains = ((Op.FORWARD, down), (Op.FORWARD, up), (Op.INPUT, up), (Op.INPUT, down))
        self.ahead: deque[Timed] = deque(sorted(
            ((time + PERIOD * microbatch, Action(op, stage, microbatch)) for microbatch in range(microbatches)
             for time, (op, stage) in zip(times, chains, strict=False)), key=lambda timed: timed[0]))
        self.waiting: list[tuple[int, int, int]] = []  # a heap of weight halves: time, stage, microbatch
        self.program: list[Action] = []
        self._weight_at = {up: times[4], down: times[5]}
        self._last_stage = 2 * ranks - 1
        self._forwards = 2 * microbatches
        self._held = 0

    def next(self, made: dict[tuple[Op, int, int], int], now: int, most: int) -> Action | None:
        """What to do now, if there is anything."""
        weight = weight_half(*self.waiting[0][1:]) if self.waiting else None
        if not self.ahead:
            return weight
        due, action = self.ahead[0]
        goes = action.op is Op.FORWARD
        before = (action.op, action.stage - 1 if goes else action.stage + 1, action.microbatch)
        if not goes and action.stage == self._last_stage:
            before = (Op.FORWARD, action.stage, action.microbatch)
        there = (goes and action.stage == 0) or made.get(before, now + 1) <= now
        if not there or (goes and self._held >= most):
            return weight
        return weight if weight is not None and self._forwards and self.waiting[0][0] < due else action

    def take(self, action: Action) -> None:
        self.program.append(action)
        if action.op is Op.WEIGHT:
            heappop(self.waiting)
            self._held -= 1
            return
        self.ahead.popleft()
        if action.op is Op.FORWARD:
            self._held += 1
            self._forwards -= 1
        else:
            time = self._weight_at[action.stage] + PERIOD * action.microbatch
            heappush(self.waiting, (time, action.stage, action.microbatch))
