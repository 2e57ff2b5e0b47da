"""Chimera: two 1F1B pipelines in opposite directions, each in the gaps of the other."""

from collections.abc import Iterator

from vpipe.schedules.assignment import Size, both_ways
from vpipe.schedules.generators.dualpipe import odd_ranks
from vpipe.schedules.kinds import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


def _peak(rank: int, size: Size) -> int:
    p, unit = size.ranks, min(size.microbatches, size.ranks)
    own, other = (unit + (2 * rank < p)) // 2, (unit + (2 * rank >= p)) // 2
    return own + min(other, min(rank, p - 1 - rank) + 1)


@register_schedule("chimera", flush=True, layout=both_ways, peak_activations=_peak,
                   requires=lambda size: odd_ranks("chimera", size), planned=True)
def chimera(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds copies of stages r and p-1-r; here p = 4. Small letters are those
    of the later stage. Even microbatches go down the ranks, odd ones up. B takes twice as long as F, S is the steps.

    ::

        rank 0  F0 F2 .  f1 b1 -- f3 b3 -- .  B0 -- .  .  B2 -S
        rank 1  .  F0 f1 F2 f3 .  b1 -- B0 -- b3 -- B2 -S
        rank 2  .  F1 f0 F3 f2 .  b0 -- B1 -- b2 -- B3 -S
        rank 3  F1 F3 .  f0 b0 -- f2 b2 -- .  B1 -- .  .  B3 -S

    That is a unit, of p microbatches. Where F and B take equally long, stage s does F of the k-th microbatch that comes
    its way at time s + 2k, B at 2p-1-s + 2k; no rank is wanted twice at a time, and units follow each other every 2p
    without a gap. So the bubble of m microbatches is (p-2)F, the published share (p-2)/(2m+p-2). With B >= F it is
    (p-2)(nB - (n-1)F) for n = m/p whole units: each unit after the first adds (p-2)(B-F), as its forwards fill gaps
    that the backwards of the one before leave. Rank r holds the activations of p/2+1 to p microbatches,
    p/2+1+min(r, p-1-r), and the weights of two stages.

    Source: Li and Hoefler, Chimera (SC 2021, arXiv:2107.06925), section 3.1; units one after the other, section 3.5.
    """
    timed = []
    for microbatch in range(microbatches):
        unit, number = divmod(microbatch, ranks)
        stage, first = ranks - 1 - rank if number % 2 else rank, 2 * ranks * unit + number - number % 2
        timed += [(first + stage, forward(stage, microbatch)),
                  (first + 2 * ranks - 1 - stage, backward(stage, microbatch))]
    yield from (action for _, action in sorted(timed))
    # The pair of ranks that shares two stages sums their gradients in one order, those that are there first at first.
    yield step(max(rank, ranks - 1 - rank), 0)
    yield step(min(rank, ranks - 1 - rank), 0)
