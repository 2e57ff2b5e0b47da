"""V-Half and V-Min: a half and a third of the memory of 1F1B, with two stages per rank in the shape of a V."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush

from vpipe.schedules.assignment import Layout
from vpipe.schedules.kinds import Action, Op, step, weight_half
from vpipe.schedules.registry import register_schedule

PERIOD = 6
"""Units of time in which a rank begins one microbatch: F, I and W of each of its two stages take one unit each."""


def _times(strides: Sequence[int], gaps: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return the units of ``rank``: of F and I on its chunks in the order of the chains, then of W on 1 and 0."""
    chain_units, start = [], 0
    for chain, (stride, gap) in enumerate(zip(strides, (*gaps, 0), strict=True)):
        hops = ranks - 1 - rank if chain % 2 else rank  # the odd chains lead from the last rank to the first
        chain_units.append(start + stride * hops)
        start += stride * (ranks - 1) + 1 + gap
    # The four chains leave two units of the period free. Each W takes one of them, soon after its I.
    first_free, second_free = {*range(PERIOD)} - {unit % PERIOD for unit in chain_units}
    choices = [[done + 1 + (unit - done - 1) % PERIOD for done, unit in zip(chain_units[2:], free, strict=True)]
               for free in ((first_free, second_free), (second_free, first_free))]
    return chain_units + min(choices, key=sum)


@lru_cache(maxsize=8)
def repeat_block(strides: tuple[int, ...], gaps: tuple[int, ...], ranks: int, microbatches: int,
                 max_in_flight: int) -> tuple[tuple[Action, ...], ...]:
    """Return the program of every rank: the block of one microbatch repeated, then squeezed at both ends.

    Within a block the four chains - forward down and up, input half down and up - take a fixed number of units from
    rank to rank, their stride. The strides determine how long a microbatch stays, and with it how many are there at
    once. Every action is done as soon as it can be, in the order of the repeated block. Weight halves fill units in
    which the rank would idle. After a rank's last forward, input halves go before weight halves.

    Args:
        strides: units from rank to rank of F on chunk 0, F on chunk 1, I on chunk 1, I on chunk 0.
        gaps: units between two chains, before the second, the third and the fourth; such that no two actions of a
            rank fall on the same unit modulo :data:`PERIOD`.
        max_in_flight: limit of a rank's microbatch-stages between F and W; at it no new forward begins.
    """
    lines = [_RankProgram(_times(strides, gaps, rank, ranks), rank, ranks, microbatches) for rank in range(ranks)]
    done: set[Action] = set()  # in the units before
    while any(line.ahead or line.waiting for line in lines):
        doing = [(line, action) for line in lines if (action := line.next(done, max_in_flight)) is not None]
        for line, action in doing:
            line.append(action)
            done.add(action)
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

    def next(self, done: Collection[Action], max_in_flight: int) -> Action | None:
        """Return the action to do now; None when there is none."""
        weight = weight_half(*self.waiting[0][1:]) if self.waiting else None
        if not self.ahead:
            return weight
        due, action = self.ahead[0]
        is_forward = action.op is Op.FORWARD
        before = (action.op, action.stage - 1 if is_forward else action.stage + 1, action.index)
        if not is_forward and action.stage == self._last_stage:
            before = (Op.FORWARD, action.stage, action.index)
        possible = (is_forward and action.stage == 0) or before in done
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


@register_schedule("v_half", flush=True, layout=Layout.ZIGZAG, chunks=2,
                   peak_activations=lambda rank, size: 2 * min((size.ranks + 2) // 2, size.microbatches))
def v_half(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds stages r and 2p-1-r.

    In the example p = 2, and small letters are actions of the rank's second stage. I and W are the input and the weight
    half of a backward, S is the steps.

    ::

        rank 0  F0 F1 .  f0 i0 F2 w0 .  f1 i1 I0 W0 F3 w1 f2 i2 I1 W1 w2 .  f3 i3 I2 W2 I3 w3 W3 S
        rank 1  .  F0 f0 F1 .  i0 w0 f1 F2 I0 W0 i1 w1 f2 F3 I1 W1 i2 w2 f3 I2 W2 i3 I3 w3 W3 S

    Each rank holds at most (p+2)//2 microbatches, each two microbatch-stages, counted as the paper does from F to W.
    The checker counts from F to I, which is never more. The bubble for F = I = W is about half of 1F1B's
    3(p-1)F, F being the time of a whole rank: at most (3p-2)F/2 when m >= 2p.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv:2405.15362), section 3; the gaps between the
    chains, the memory's bound and the ends are this file's.
    """
    # No two actions of a rank may fall on the same unit of the block: which gaps avoid that depends on p's parity.
    gaps = (1, 0, 0) if ranks % 2 else (4, 0, 3)
    yield from repeat_block((2, 1, 2, 1), gaps, ranks, microbatches, 2 * ((ranks + 2) // 2))[rank]


@register_schedule("v_min", flush=True, layout=Layout.ZIGZAG, chunks=2,
                   peak_activations=lambda rank, size: 2 * min((size.ranks + 4) // 3, size.microbatches))
def v_min(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds stages r and 2p-1-r.

    In the example p = 2, and small letters are actions of the rank's second stage. I and W are the input and the weight
    half of a backward, S is the steps.

    ::

        rank 0  F0 .  .  f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 F3 I2 W2 f3 i3 w3 .  I3 W3 S
        rank 1  .  F0 f0 .  .  i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 F3 f3 w2 W2 i3 I3 w3 W3 S

    Each rank holds at most (p+4)//3 microbatches, each two microbatch-stages, counted as the paper does from F to W.
    The checker counts from F to I, which is never more. The bubble for F = I = W and p > 1 is
    (4p-5)F/2, about two thirds of 1F1B's 3(p-1)F, F being the time of a whole rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv:2405.15362), section 3; the gaps between the
    chains and the ends are this file's.
    """
    # No two actions of a rank may fall on the same unit of the block: without gaps they do where 3 divides p.
    gaps = (0, 0, 0) if ranks % 3 else (2, 0, 2)
    yield from repeat_block((1, 1, 1, 1), gaps, ranks, microbatches, 2 * ((ranks + 4) // 3))[rank]
