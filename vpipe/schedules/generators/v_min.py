"""V-Min: a third of the memory of 1F1B, with two stages per rank in the shape of a V."""

from collections.abc import Iterator

from vpipe.schedules.action import Action
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Layout, Size
from vpipe.schedules.v_schedules import BuildingBlock, repeat_block


def _peak(rank: int, size: Size) -> int:
    return 2 * min((size.ranks + 4) // 3, size.microbatches)


@register_schedule("v_min", flush=True, layout=Layout.ZIGZAG, chunks=2, peak_activations=_peak, planned=False)
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
    chains and the ends are this file's and :mod:`vpipe.schedules.v_schedules`'s.
    """
    # No two actions of a rank may fall on the same unit of the block: without gaps they do where 3 divides p.
    gaps = (0, 0, 0) if ranks % 3 else (2, 0, 2)
    yield from repeat_block(BuildingBlock((1, 1, 1, 1), gaps), ranks, microbatches, 2 * ((ranks + 4) // 3))[rank]
