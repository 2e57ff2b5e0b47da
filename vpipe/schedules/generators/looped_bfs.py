"""Looped breadth-first: every microbatch through a rank's first stage, then through its second, and back."""

from collections.abc import Iterator

from vpipe.schedules.action import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Layout


@register_schedule("looped_bfs", flush=True, layout=Layout.LOOP, chunks=2, any_chunks=True,
                   peak_activations=lambda rank, size: size.microbatches * size.chunks, planned=False)
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
