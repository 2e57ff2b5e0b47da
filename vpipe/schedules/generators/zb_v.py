"""ZB-V: two stages per rank in the shape of a V, and no bubble at the memory of 1F1B."""

from collections.abc import Iterator

from vpipe.schedules.action import Action
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Layout, Size
from vpipe.schedules.v_schedules import VPhases


def _peak(rank: int, size: Size) -> int:
    return min(2 * size.microbatches, size.microbatches + 1 + rank, 2 * size.ranks)


@register_schedule("zb_v", flush=True, layout=Layout.ZIGZAG, chunks=2, peak_activations=_peak)
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
