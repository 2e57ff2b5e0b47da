"""Interleaved 1F1B: several stages per rank, so that the pipeline fills in smaller pieces."""

from collections.abc import Iterator

from vpipe.errors import Problem
from vpipe.schedules.action import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Layout, Size


def _warmup(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return the number of forwards before the first one that a backward follows."""
    if microbatches == ranks:
        return microbatches * chunks
    return min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, microbatches * chunks)


def _peak(rank: int, size: Size) -> int:
    return min(_warmup(rank, size.ranks, size.microbatches, size.chunks) + 1, size.microbatches * size.chunks)


def _whole_rounds(size: Size) -> Problem | None:
    if size.microbatches % size.ranks == 0:
        return None
    up = -(-size.microbatches // size.ranks) * size.ranks
    fitting = [up - size.ranks] * (up > size.ranks) + [up]
    return Problem(f"'interleaved' sends microbatches round in groups of {size.ranks}, one per rank, and "
                   f"{size.microbatches} microbatches are no multiple of {size.ranks}",
                   f"use {' or '.join(map(str, fitting))} microbatches, or as many ranks as divide "
                   f"{size.microbatches}")


@register_schedule("interleaved", flush=True, layout=Layout.LOOP, chunks=2, any_chunks=True,
                   peak_activations=_peak, requires=_whole_rounds)
def interleaved(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds v stages; here p = 2, v = 2, and small letters are those of the
    second stage. B takes twice as long as F, S is the steps.

    ::

        rank 0  F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 -S
        rank 1  .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -S

    Bubble (p-1)(F+B)/v with F and B the times of a whole rank, B a whole backward: 1/v of 1F1B's. Rank r holds the
    activations of 2(p-1-r) + (v-1)p + 1 microbatch-stages, so rank 0 those of (p(v+1)-1)/v microbatches; of
    all m when m = p, where every forward comes before the first backward. Microbatches go round in groups
    of p, so m is a multiple of p.

    Source: Narayanan et al., Megatron-LM (arXiv:2104.04473), section 2.2.
    """
    total = microbatches * chunks
    warmup = _warmup(rank, ranks, microbatches, chunks)

    def turn(position: int) -> tuple[int, int]:
        """Return chunk and microbatch of the forward at ``position``; backwards visit the chunks in reverse."""
        group, within = divmod(position, ranks * chunks)
        return within // ranks, group * ranks + within % ranks

    for position in range(total + warmup):
        if position < total:
            chunk, microbatch = turn(position)
            yield forward(Layout.LOOP.stage_of(rank, chunk, ranks), microbatch)
        if position >= warmup:
            chunk, microbatch = turn(position - warmup)
            yield backward(Layout.LOOP.stage_of(rank, chunks - 1 - chunk, ranks), microbatch)
    for chunk in range(chunks):
        yield step(Layout.LOOP.stage_of(rank, chunk, ranks), 0)
