"""DualPipeV: a V of two stages per rank whose forwards run beside backwards of the other stage."""

from collections.abc import Iterator

from vpipe.errors import Problem
from vpipe.schedules.action import Action
from vpipe.schedules.generators.zb_v import VPhases
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Layout, Size


def _two_per_rank(size: Size) -> Problem | None:
    if size.microbatches >= 2 * size.ranks:
        return None
    fewer = f", or {size.microbatches // 2} ranks or fewer" if size.microbatches > 1 else ""
    return Problem(f"'dualpipe_v' fills {size.ranks} ranks with {2 * size.ranks} microbatches, two per rank, but there "
                   f"are {size.microbatches}", f"use {2 * size.ranks} microbatches or more{fewer}")


@register_schedule("dualpipe_v", flush=True, layout=Layout.ZIGZAG, chunks=2,
                   peak_activations=lambda rank, size: 2 * size.ranks + 1, requires=_two_per_rank, planned=False)
def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds stages r and 2p-1-r; here p = 2. Small letters are those of the
    second. B takes twice as long as F, I and W are its input and its weight half, S is the steps.

    ::

        rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1 -- f2 B0 -- b2 -- f3 .  B1 -- b3 -- I2 W2 I3 W3 S
        rank 1  .  F0 f0 F1 f1 F2 b0 -- f2 B0 -- F3 b1 -- f3 B1 -- b2 -- B2 -- i3 I3 w3 W3 S

    A forward and the whole backward beside it, F0 B1 or F1 B0, are neighbours on different microbatches, so that one
    may compute while the other communicates. With F, I, W the times of one stage, of which a rank holds two, the bubble
    is (p-1)(F+I-W) as long as W <= I <= F <= I+W. The published (p-1)(F&B + B - 3W), with B = I + W and
    F&B = F + B, counts such a pair as one block that sends when both are done. Every rank holds the activations of 2p+1
    microbatch-stages. Filling the V takes m >= 2p.

    Source: DeepSeek-AI, DualPipe (arXiv:2412.19437, section 3.2.1), cut in half to a V by Qi et al. of Sea AI Lab.
    """
    phases, below = VPhases(rank, ranks, microbatches), ranks - 1 - rank
    yield from phases.repeat("F0", 2 * below)
    yield from phases.repeat("F0 F1", rank + 1)
    yield from phases.repeat("I1 W1 F1", below)
    yield from phases.repeat("F0 B1 F1 B0", microbatches - 2 * ranks + rank + 1)
    yield from phases.repeat("B1 F1 B0", below)
    whole = (rank + 1) // 2
    yield from phases.repeat("B1 B0", whole)
    yield from phases.repeat("I1 I0" if rank % 2 else "B1 I0", 1)
    yield from phases.repeat("I1 I0", rank - whole)
    yield from phases.repeat("W I0", below)
    yield from phases.finish()
