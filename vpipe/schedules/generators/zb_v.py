"""ZB-V: two stages per rank in the shape of a V, and no bubble at the memory of 1F1B."""

from collections.abc import Iterator
from itertools import count

from vpipe.schedules import kinds
from vpipe.schedules.assignment import Layout, Size
from vpipe.schedules.kinds import Action, Op, step, weight_half
from vpipe.schedules.registry import register_schedule


def _peak(rank: int, size: Size) -> int:
    return min(2 * size.microbatches, size.microbatches + 1 + rank, 2 * size.ranks)


@register_schedule("zb_v", flush=True, layout=Layout.ZIGZAG, chunks=2, peak_activations=_peak, planned=True)
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds stages r and 2p-1-r; here p = 2. Small letters are those of the
    second. I and W are the input and the weight half of a backward, S is the steps.

    ::

        rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 S
        rank 1  .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3 S

    No bubble when F = I = W and m >= 2p: the last stage is on the first rank, so that the first gradient is there as
    soon as the pipeline is full. With p < m < 2p the bubble is (2p-m)F, with m <= p it is (2p-1-m)F, F being the time
    of a whole rank. Every rank holds the activations of 2p microbatch-stages, as much as 1F1B's first rank; of
    min(2m, m+1+r) when m < 2p.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 6.
    """
    phases, below = VPhases(rank, ranks, microbatches), ranks - 1 - rank
    yield from phases.repeat("F0", 2 * below + 1)
    yield from phases.repeat("F1 F0", rank)
    yield from phases.repeat("F1 I1 W1", below + 1)
    yield from phases.repeat("F0 I0 W0 F1 I1 W1", max(microbatches, 2 * ranks) - 2 * ranks + rank + 1)
    yield from phases.repeat("I0 W0 F1 I1 W1", below)
    yield from phases.repeat("I0 I1", rank)
    yield from phases.repeat("I0 W", below + 1)
    yield from phases.finish()


class VPhases:
    """Write a rank's program as phases of repeated turns.

    A turn is a text such as ``F0 I1 W1``: operations, each with its chunk, 0 on the way down and 1 on the way up. Every
    operation takes the microbatches in order; those from ``microbatches`` on are left out. ``W`` without a chunk is the
    weight half that has waited longest. With several waves, a group of 2p microbatches goes through all of them before
    the next group; the backwards traverse the waves in reverse.
    """

    def __init__(self, rank: int, ranks: int, microbatches: int, waves: int = 1) -> None:
        self._stages = [Layout.ZIGZAG.stage_of(rank, chunk, ranks) for chunk in range(2 * waves)]
        self._microbatches, self._group = microbatches, 2 * ranks
        self._passes = {(is_forward, chunk): self._order(is_forward, chunk)
                        for is_forward in (True, False) for chunk in (0, 1)}
        self._waiting: list[Action] = []

    def repeat(self, turn: str, times: int) -> Iterator[Action]:
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
