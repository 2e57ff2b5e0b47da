"""V-Half: half the memory of 1F1B and half its bubble, with two stages per rank in the shape of a V."""

from collections.abc import Iterator

from vpipe.schedules.action import Action
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Layout, Size
from vpipe.schedules.v_schedules import BuildingBlock, repeat_block


def _peak(rank: int, size: Size) -> int:
    return 2 * min((size.ranks + 2) // 2, size.microbatches)


@register_schedule("v_half", flush=True, layout=Layout.ZIGZAG, chunks=2, peak_activations=_peak, planned=False)
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
    chains, the memory's bound and the ends are this file's and :mod:`vpipe.schedules.v_schedules`'s.
    """
    # No two actions of a rank may fall on the same unit of the block: which gaps avoid that depends on p's parity.
    gaps = (1, 0, 0) if ranks % 2 else (4, 0, 3)
    yield from repeat_block(BuildingBlock((2, 1, 2, 1), gaps), ranks, microbatches, 2 * ((ranks + 2) // 2))[rank]
