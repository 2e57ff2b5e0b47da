"""ZB-H2: more forwards ahead than 1F1B, so that weight gradients can fill the whole cooldown."""

from collections.abc import Iterator

from vpipe.schedules.action import Action
from vpipe.schedules.generators.zb_h1 import delayed_weights
from vpipe.schedules.registry import register_schedule


@register_schedule("zb_h2", flush=True,
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
    turns = [(rank, microbatch) for microbatch in range(microbatches)]
    yield from delayed_weights(turns, turns, warmup=2 * (ranks - 1 - rank), after=2 * rank)
