"""DualPipe: microbatches from both ends, and each rank's forwards one way beside its backwards the other way.

DualPipeV is its half: a V of two stages per rank whose forwards run beside backwards of the other stage.
"""

from collections.abc import Callable, Iterator

from vpipe.errors import Problem, counted
from vpipe.schedules.assignment import Layout, Size, both_ways
from vpipe.schedules.generators.zb_v import VPhases
from vpipe.schedules.kinds import Action
from vpipe.schedules.registry import register_schedule


def _two_per_rank(size: Size) -> Problem | None:
    if size.microbatches >= 2 * size.ranks:
        return None
    fewer = f", or {size.microbatches // 2} ranks or fewer" if size.microbatches > 1 else ""
    return Problem(f"'dualpipe_v' fills {size.ranks} ranks with {2 * size.ranks} microbatches, two per rank, but there "
                   f"are {size.microbatches}", f"use {2 * size.ranks} microbatches or more{fewer}")


@register_schedule("dualpipe_v", flush=True, layout=Layout.ZIGZAG, chunks=2,
                   peak_activations=lambda rank, size: 2 * size.ranks + 1, requires=_two_per_rank)
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


def odd_ranks(name: str, size: Size) -> Problem | None:
    """Return what is wrong with an odd number of ranks, of which one would be its own opposite; None if it is even."""
    if size.ranks % 2 == 0:
        return None
    even = " or ".join(str(ranks) for ranks in (size.ranks - 1, size.ranks + 1) if ranks)
    return Problem(f"'{name}' sends microbatches both ways through an even number of ranks, one stage each, but there "
                   f"{'is' if size.ranks == 1 else 'are'} {counted(size.ranks, 'rank')}", f"use {even} ranks")


def _pairs(size: Size) -> Problem | None:
    p, m = size.ranks, size.microbatches
    if m >= 2 * p and m % 2 == 0:
        return odd_ranks("dualpipe", size)
    fewer = f", or {m // 4 * 2} ranks or fewer" if m >= 4 and m < 2 * p else ""
    return odd_ranks("dualpipe", size) or Problem(
        f"'dualpipe' fills {p} ranks with {2 * p} microbatches, as many from either end, but there are {m}",
        f"use an even number of microbatches, {max(2 * p, m + m % 2)} or more{fewer}")


@register_schedule("dualpipe", flush=True, layout=both_ways, peak_activations=lambda rank, size: size.ranks + 1,
                   requires=_pairs, planned=True)
def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds copies of stages r and p-1-r; here p = 4. Small letters are those
    of the later stage. Even microbatches go down the ranks, odd ones up. B takes twice as long as F, I and W are its
    input and its weight half, S is the steps.

    ::

        rank 0  F0 F2 F4 f1 i1 w1 f3 F6 b3 -- f5 B0 -- b5 -- f7 .  B2 -- b7 -- I4 W4 I6 W6 S
        rank 1  .  F0 f1 F2 f3 F4 b1 -- f5 B0 -- F6 b3 -- f7 B2 -- b5 -- B4 -- i7 I6 w7 W6 S
        rank 2  .  F1 f0 F3 f2 F5 b0 -- f4 B1 -- F7 b2 -- f6 B3 -- b4 -- B5 -- i6 I7 w6 W7 S
        rank 3  F1 F3 F5 f0 i0 w0 f2 F7 b2 -- f4 B1 -- b4 -- f6 .  B3 -- b6 -- I5 W5 I7 W7 S

    It is DualPipeV unfolded: ranks r and p-1-r do what rank r of DualPipeV does over p/2 ranks, each with half of the
    microbatches. With F, I, W the times of one stage the bubble is (p/2-1)(F+I-W) as long as W <= I <= F <= I+W. The
    published (p/2-1)(F&B + B - 3W), with B = I + W and F&B = F + B, counts a forward and the whole backward beside it
    as one block that sends when both are done. Every rank holds the activations of p+1 microbatches, and the weights of
    two stages. Filling the pipeline takes m >= 2p, m even.

    Source: DeepSeek-AI, DualPipe (arXiv:2412.19437, section 3.2.1).
    """
    return unfolded(dualpipe_v, rank, ranks, microbatches)


def unfolded(vee: Callable[[int, int, int], Iterator[Action]], rank: int, ranks: int,
             microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p in the schedule of which a V over p/2 ranks is the half.

    Rank h of such a V holds stages h and p-1-h. So do ranks h and p-1-h here. Each of the two does what the V's rank
    does, with half of the microbatches: with the even ones on the stage that it holds for the way down, with the odd
    ones on the other.
    """
    for action in vee(min(rank, ranks - 1 - rank), ranks // 2, microbatches // 2):
        yield action._replace(index=2 * action.index + (action.stage != rank)) \
            if action.op.per_microbatch else action
