"""Several stages per rank, so that the pipeline fills in smaller pieces: interleaved 1F1B, and looped breadth-first,
which takes every microbatch through a rank's first stage, then through its second, and back."""

from collections.abc import Iterator
from functools import partial

from vpipe.errors import Problem
from vpipe.schedules.assignment import Layout, Size
from vpipe.schedules.generators.one_f_one_b import one_forward_one_backward
from vpipe.schedules.kinds import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


def _warmup(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return the number of forwards before the first one that a backward follows."""
    if microbatches == ranks:
        return microbatches * chunks
    return min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, microbatches * chunks)


def _peak(rank: int, size: Size) -> int:
    return min(_warmup(rank, size.ranks, size.microbatches, size.chunks) + 1, size.microbatches * size.chunks)


def whole_rounds(name: str, size: Size) -> Problem | None:
    """Return a problem where microbatches cannot go round in groups of one per rank."""
    if size.microbatches % size.ranks == 0:
        return None
    up = -(-size.microbatches // size.ranks) * size.ranks
    fitting = [up - size.ranks] * (up > size.ranks) + [up]
    return Problem(f"'{name}' sends microbatches round in groups of {size.ranks}, one per rank, and "
                   f"{size.microbatches} microbatches are no multiple of {size.ranks}",
                   f"use {' or '.join(map(str, fitting))} microbatches, or as many ranks as divide "
                   f"{size.microbatches}")


def turns(rank: int, ranks: int, microbatches: int, chunks: int) -> list[list[tuple[int, int]]]:
    """Return stage and microbatch of the forwards of a rank, in order; and of its backwards, the last stage first."""
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    stages = [Layout.LOOP.stage_of(rank, chunk, ranks) for chunk in range(chunks)]
    return [[(stage, microbatch) for group in groups for stage in order for microbatch in group]
            for order in (stages, stages[::-1])]


@register_schedule("interleaved", flush=True, layout=Layout.LOOP, chunks=2, any_chunks=True,
                   peak_activations=_peak, requires=partial(whole_rounds, "interleaved"), planned=True)
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
    forwards, backwards = turns(rank, ranks, microbatches, chunks)
    yield from one_forward_one_backward(forwards, backwards, _warmup(rank, ranks, microbatches, chunks))
    for chunk in range(chunks):
        yield step(Layout.LOOP.stage_of(rank, chunk, ranks), 0)


@register_schedule("looped_bfs", flush=True, layout=Layout.LOOP, chunks=2, any_chunks=True,
                   peak_activations=lambda rank, size: size.microbatches * size.chunks)
def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds v stages; here p = 2, v = 2, and small letters are those of the
    second stage. B takes twice as long as F, S is the steps.

    ::

        rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0 -- b1 -- b2 -- b3 -- B0 -- B1 -- B2 -- B3 -S
        rank 1  .  F0 F1 F2 F3 f0 f1 f2 f3 b0 -- b1 -- b2 -- b3 -- B0 -- B1 -- B2 -- B3 -S

    Bubble (p-1)(F+B)/v with F and B the times of a whole rank, B a whole backward: 1/v of GPipe's. With fewer
    microbatches than ranks, m < p, a rank also waits for each of its stages: (p-1 + (v-1)(p-m)) (F+B)/v.
    Every rank holds the activations of all v m microbatch-stages. Backward runs in the order of forward (the
    paper draws either), which is the order in which plain PyTorch accumulates gradients.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv:2211.05953), section 4.
    """
    stages = [Layout.LOOP.stage_of(rank, chunk, ranks) for chunk in range(chunks)]
    for stage in stages:
        for microbatch in range(microbatches):
            yield forward(stage, microbatch)
    for stage in reversed(stages):
        for microbatch in range(microbatches):
            yield backward(stage, microbatch)
    for stage in stages:
        yield step(stage, 0)
