"""Write the programs of V-shaped schedules, in which a rank holds one stage on the way down and one on the way up.

:func:`repeat_block` repeats a building block, as V-Half and V-Min do. :class:`VPhases` writes a program as phases of
repeated turns, as ZB-V, DualPipeV and Hanayo do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count

from vpipe.schedules import kinds
from vpipe.schedules.action import Action, Kind, Op, step, weight_half
from vpipe.schedules.size import Layout

PERIOD = 6
"""Units of time in which a rank begins one microbatch: F, I and W of each of its two stages take one unit each."""


@dataclass(frozen=True)
class BuildingBlock:
    """The times at which every rank of a V does the six actions of one microbatch.

    Within a block the four chains - forward down and up, input half down and up - take a fixed number of units from
    rank to rank, their stride. The strides determine how long a microbatch stays, and with it how many are there at
    once.

    Attributes:
        strides: units from rank to rank of F on chunk 0, F on chunk 1, I on chunk 1, I on chunk 0.
        gaps: units between two chains, before the second, the third and the fourth; such that no two actions of a
            rank fall on the same unit modulo :data:`PERIOD`.
    """

    strides: tuple[int, int, int, int]
    gaps: tuple[int, int, int]

    def times(self, rank: int, ranks: int) -> list[int]:
        """Return the units of ``rank``: of F and I on its chunks in the order of the chains, then of W on 1 and 0."""
        chain_units, start = [], 0
        for chain, (stride, gap) in enumerate(zip(self.strides, (*self.gaps, 0), strict=True)):
            hops = ranks - 1 - rank if chain % 2 else rank  # the odd chains lead from the last rank to the first
            chain_units.append(start + stride * hops)
            start += stride * (ranks - 1) + 1 + gap
        # The four chains leave two units of the period free. Each W takes one of them, soon after its I.
        first_free, second_free = {*range(PERIOD)} - {unit % PERIOD for unit in chain_units}
        choices = [[done + 1 + (unit - done - 1) % PERIOD for done, unit in zip(chain_units[2:], free, strict=True)]
                   for free in ((first_free, second_free), (second_free, first_free))]
        return chain_units + min(choices, key=sum)


@lru_cache(maxsize=8)
def repeat_block(block: BuildingBlock, ranks: int, microbatches: int,
                 max_in_flight: int) -> tuple[tuple[Action, ...], ...]:
    """Return the program of every rank: the block repeated, then squeezed at both ends.

    Every action is done as soon as it can be, in the order of the repeated block. Weight halves fill units in which the
    rank would idle. After a rank's last forward, input halves go before weight halves.

    Args:
        max_in_flight: limit of a rank's microbatch-stages between F and W; at it no new forward begins.
    """
    lines = [_RankProgram(block.times(rank, ranks), rank, ranks, microbatches) for rank in range(ranks)]
    available: dict[tuple[Kind, int, int], int] = {}  # the unit from which an action's result can be used
    now = 0
    while any(line.ahead or line.waiting for line in lines):
        for line in lines:
            action = line.next(available, now, max_in_flight)
            if action is not None:
                line.append(action)
                available[action.op, action.stage, action.index] = now + 1
        now += 1
    return tuple((*line.program, *(step(stage, 0) for stage in line.stages)) for line in lines)


class _RankProgram:
    """The program of a rank so far, and the actions that are ahead of it."""

    def __init__(self, times: Sequence[int], rank: int, ranks: int, microbatches: int) -> None:
        self.stages = [Layout.ZIGZAG.stage_of(rank, chunk, ranks) for chunk in (0, 1)]
        down, up = self.stages
        chains = ((Op.FORWARD, down), (Op.FORWARD, up), (Op.INPUT, up), (Op.INPUT, down))
        self.ahead = deque(sorted(  # with the unit of each in the repeated block
            ((time + PERIOD * microbatch, Action(op, stage, microbatch)) for microbatch in range(microbatches)
             for time, (op, stage) in zip(times, chains, strict=False)), key=lambda timed: timed[0]))
        self.waiting: list[tuple[int, int, int]] = []  # a heap of weight halves: unit, stage, microbatch
        self.program: list[Action] = []
        self._weight_at = {up: times[4], down: times[5]}
        self._last_stage = 2 * ranks - 1
        self._forwards_left = 2 * microbatches
        self._in_flight = 0

    def next(self, available: dict[tuple[Kind, int, int], int], now: int, max_in_flight: int) -> Action | None:
        """Return the action to do now; None when there is none."""
        weight = weight_half(*self.waiting[0][1:]) if self.waiting else None
        if not self.ahead:
            return weight
        due, action = self.ahead[0]
        is_forward = action.op is Op.FORWARD
        before = (action.op, action.stage - 1 if is_forward else action.stage + 1, action.index)
        if not is_forward and action.stage == self._last_stage:
            before = (Op.FORWARD, action.stage, action.index)
        possible = (is_forward and action.stage == 0) or available.get(before, now + 1) <= now
        if not possible or (is_forward and self._in_flight >= max_in_flight):
            return weight
        # Until the last forward, a weight half whose unit in the repeated block comes earlier goes first.
        if weight is not None and self._forwards_left and self.waiting[0][0] < due:
            return weight
        return action

    def append(self, action: Action) -> None:
        self.program.append(action)
        if action.op is Op.WEIGHT:
            heappop(self.waiting)
            self._in_flight -= 1
            return
        self.ahead.popleft()
        if action.op is Op.FORWARD:
            self._in_flight += 1
            self._forwards_left -= 1
        else:
            time = self._weight_at[action.stage] + PERIOD * action.index
            heappush(self.waiting, (time, action.stage, action.index))


class VPhases:
    """Write a rank's program as phases of repeated turns.

    A turn is a text such as ``F0 I1 W1``: operations, each with its chunk, 0 on the way down and 1 on the way up. Every
    operation takes the microbatches in order; those from ``microbatches`` on are left out. ``W`` without a chunk is the
    weight half that has waited longest. With several waves, a group of 2p microbatches goes through all of them before
    the next group; the backwards traverse the waves in reverse.
    """

    def __init__(self, rank: int, ranks: int, microbatches: int, waves: int = 1) -> None:
        self._stages = [Layout.ZIGZAG.stage_of(rank, chunk, ranks) for chunk in range(2 * waves)]
        self._microbatches, self._waves, self._group = microbatches, waves, 2 * ranks
        self._passes = {(is_forward, chunk): self._order(is_forward, chunk)
                        for is_forward in (True, False) for chunk in (0, 1)}
        self._waiting: list[Action] = []

    def repeat(self, turn: str, times: int) -> Iterator[Action]:
        """Yield the actions of so many turns."""
        operations = [(kinds.named(word[0]), [int(chunk) for chunk in word[1:]]) for word in turn.split()]
        for _ in range(times):
            for op, chunks in operations:
                if op is not Op.WEIGHT:
                    stage, microbatch = next(self._passes[op is Op.FORWARD, chunks[0]])
                    if microbatch < self._microbatches:
                        if op is Op.INPUT:
                            self._waiting.append(weight_half(stage, microbatch))
                        yield Action(op, stage, microbatch)
                    continue
                stages = [self._stages[chunk] for chunk in chunks] or self._stages
                half = next((half for half in self._waiting if half.stage in stages), None)
                if half is not None:
                    self._waiting.remove(half)
                    yield half

    def finish(self) -> Iterator[Action]:
        """Yield every weight half that still waits, and the steps."""
        yield from self._waiting
        yield from (step(stage, 0) for stage in self._stages)

    def _order(self, is_forward: bool, chunk: int) -> Iterator[tuple[int, int]]:
        """Yield stage and microbatch of every pass through a wave, without end."""
        stages = self._stages[chunk::2] if is_forward else self._stages[chunk::2][::-1]
        for first in count(0, self._group):
            for stage in stages:
                for microbatch in range(first, first + self._group):
                    yield stage, microbatch
