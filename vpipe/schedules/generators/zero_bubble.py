"""Zero bubble: 1F1B whose weight gradients wait until the rank has nothing else to do; also interleaved."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from vpipe.schedules.assignment import Layout
from vpipe.schedules.generators.interleaved import turns, whole_rounds
from vpipe.schedules.generators.one_f_one_b import one_forward_one_backward
from vpipe.schedules.kinds import Action, Op, step
from vpipe.schedules.registry import register_schedule


def delayed_weights(forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warmup: int,
                    after: int) -> Iterator[Action]:
    """Yield ``warmup`` forwards, then F and I in turn, each W ``after`` input halves after its I; then the steps.

    Args:
        forwards, backwards: stage and microbatch of each, in order.
    """
    waiting: deque[Action] = deque()
    for action in one_forward_one_backward(forwards, backwards, warmup):
        if action.op is Op.FORWARD:
            yield action
            continue
        yield Action(Op.INPUT, action.stage, action.microbatch)
        waiting.append(Action(Op.WEIGHT, action.stage, action.microbatch))
        if len(waiting) > after:
            yield waiting.popleft()
    yield from waiting
    for stage in sorted({stage for stage, _ in forwards}):
        yield step(stage, 0)


@register_schedule("zb_h1", flush=True, planned=True,
                   peak_activations=lambda rank, size: min(size.ranks - rank, size.microbatches))
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; I and W are the input and the weight half of a backward, S
    is the step.

    ::

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3 S
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 S
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 S

    Bubble (p-1)(F+I-W) for m >= p and W <= F, a third of 1F1B's when F = I = W. Stage s holds the activations of
    min(p-s, m) microbatches, as 1F1B, and what the weight halves of min(s, m) more still need.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.3.1.
    """
    own = [(rank, microbatch) for microbatch in range(microbatches)]
    yield from delayed_weights(own, own, warmup=ranks - 1 - rank, after=rank)


@register_schedule("zb_h2", flush=True, planned=True,
                   peak_activations=lambda rank, size: min(2 * (size.ranks - rank) - 1, size.microbatches))
def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; I and W are the input and the weight half of a backward, S
    is the step.

    ::

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 S
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 S
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4 S

    Bubble (p-1)(F+I-2W) for m >= 2p-1, W <= F and W <= I, which is none when F = I = W; the ranks stand aslant, so the
    step waits for nobody. With fewer microbatches it runs and idles more, for m = p as much as ZB-H1.
    Stage s holds the activations of min(2(p-s)-1, m) microbatches and what the weight halves of min(2s, m) more still
    need.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.3.2.
    """
    own = [(rank, microbatch) for microbatch in range(microbatches)]
    yield from delayed_weights(own, own, warmup=2 * (ranks - 1 - rank), after=2 * rank)


@register_schedule("interleaved_zb", flush=True, layout=Layout.LOOP, chunks=2, any_chunks=True,
                   peak_activations=lambda rank, size: size.chunks * size.ranks - rank,
                   requires=partial(whole_rounds, "interleaved_zb"))
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
