"""ZB-H1: 1F1B whose weight gradients wait until the rank has nothing else to do."""

from collections import deque
from collections.abc import Iterator, Sequence

from vpipe.schedules.action import Action, Op, step
from vpipe.schedules.generators.one_f_one_b import one_forward_one_backward
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


@register_schedule("zb_h1", flush=True,
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
    turns = [(rank, microbatch) for microbatch in range(microbatches)]
    yield from delayed_weights(turns, turns, warmup=ranks - 1 - rank, after=rank)
