"""Hanayo: waves. Microbatches run down and up the ranks, once or several times, in the manner of 1F1B."""

from collections.abc import Iterator

from vpipe.errors import Problem
from vpipe.schedules.assignment import Layout, Size
from vpipe.schedules.generators.zb_v import VPhases
from vpipe.schedules.kinds import Action
from vpipe.schedules.registry import register_schedule


def _whole_waves(size: Size) -> Problem | None:
    if size.chunks % 2 == 0:
        return None
    fitting = " or ".join(str(chunks) for chunks in (size.chunks - 1, size.chunks + 1) if chunks)
    return Problem(f"a wave of 'hanayo' takes 2 stages of every rank, one on the way down and one on the way up, so "
                   f"{size.chunks} stages per rank are no whole number of waves", f"give every rank {fitting} stages")


def _peak(rank: int, size: Size) -> int:
    v, m = size.chunks, min(size.microbatches, 2 * size.ranks)
    return min(v * m, (v - 1) * m + 1 + rank, (v - 2) * m + 2 * size.ranks)


@register_schedule("hanayo", flush=True, layout=Layout.ZIGZAG, chunks=2, any_chunks=True,
                   peak_activations=_peak, requires=_whole_waves)
def hanayo(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds v stages, two for each of v/2 waves; here p = 2, v = 2, one
    wave, and small letters are those of the second stage. B takes twice as long as F, S is the steps.

    ::

        rank 0  F0 F1 F2 f0 b0 -- f1 b1 -- F3 .  B0 -- f2 b2 -- .  B1 -- f3 b3 -- B2 -- .  .  B3 -S
        rank 1  .  F0 f0 F1 f1 .  b0 -- F2 B0 -- f2 b1 -- F3 B1 -- f3 b2 -- B2 -- b3 -- B3 -S

    Bubble (p-1) 2B/v with F and B the times of a whole rank, B = 2F a whole backward: for one wave and m >= p, for
    more waves when m is a multiple of 2p, in groups of which microbatches go from wave to wave; with other m
    the last group leaves ranks idle. A rank holds the activations of 2p microbatch-stages, 1F1B's memory, and of 4p
    more for every wave after the first (m >= 2p; fewer otherwise). The paper runs m = p and leaves the order for
    longer batches open; this one sends each group as 1F1B would, twice as many forwards ahead as there are ranks below.

    Source: Liu et al., Hanayo (arXiv:2308.15762), section 3.
    """
    waves, group, below = chunks // 2, 2 * ranks, ranks - 1 - rank
    phases = VPhases(rank, ranks, microbatches, waves)
    passes = -(-microbatches // group) * group * waves
    ahead = (waves - 1) * group
    yield from phases.repeat("F0", 2 * below + 1)
    yield from phases.repeat("F1 F0", rank + ahead)
    yield from phases.repeat("F1 B1", below + 1)
    yield from phases.repeat("F0 B0 F1 B1", passes - ahead - 2 * ranks + rank + 1)
    yield from phases.repeat("B0 F1 B1", below)
    yield from phases.repeat("B0 B1", rank + ahead)
    yield from phases.repeat("B0", below + 1)
    yield from phases.finish()
