"""Interleaved zero bubble: interleaved 1F1B whose weight gradients wait until the rank has nothing else to do."""

from collections.abc import Iterator
from functools import partial

from vpipe.schedules.action import Action
from vpipe.schedules.generators.interleaved import turns, whole_rounds
from vpipe.schedules.generators.zb_h1 import delayed_weights
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Layout


@register_schedule("interleaved_zb", flush=True, layout=Layout.LOOP, chunks=2, any_chunks=True,
                   peak_activations=lambda rank, size: size.chunks * size.ranks - rank,
                   requires=partial(whole_rounds, "interleaved_zb"), planned=False)
def interleaved_zb(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """Yield the actions of one rank of p, which holds v stages; here p = 2, v = 2, and small letters are those of the
    second stage. I and W are the input and the weight half of a backward, S is the steps.

    ::

        rank 0  F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3 S
        rank 1  .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3 S

    Bubble (p-1)(F+I-W)/v for W <= F, F, I and W being the times of a whole rank: 1/v of ZB-H1's, a third of that of
    interleaved 1F1B when F = I = W. Rank r holds the activations of vp - r microbatch-stages and what the weight halves
    of r more still need, so each rank those of p microbatches, as rank 0 of 1F1B. With one stage per rank it is ZB-H1.
    Microbatches go round in groups of p, so m is a multiple of p.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.3.1, on the stages of Narayanan et
    al., Megatron-LM (arXiv:2104.04473), section 2.2; the waits of r turns are those of torch's
    ``ScheduleInterleavedZeroBubble``.
    """
    forwards, backwards = turns(rank, ranks, microbatches, chunks)
    yield from delayed_weights(forwards, backwards, warmup=(chunks - 1) * ranks + ranks - 1 - rank, after=rank)
