"""PipeDream: 1F1B without a flush; every microbatch, or every few, updates at once."""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.schedules.action import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


@register_schedule("pipedream", flush=False,
                   peak_activations=lambda stage, stages, microbatches: min(stages - stage, microbatches),
                   versions=lambda stage, stages, microbatches: stages - stage)
def pipedream(rank: int, ranks: int, microbatches: int, update_every: int = 1) -> Iterator[Action]:
    """The actions of one rank, one stage per rank; B takes twice as long as F and ends with the step S,
    which makes the next weight version.

    ::

        rank 0  F0 F1 F2 .  .  .  .  B0 -S F3 B1 -S F4 B2 -S F5 B3 -S ...
        rank 1  .  F0 F1 .  .  B0 -S F2 B1 -S F3 B2 -S F4 B3 -S ...
        rank 2  .  .  F0 B0 -S F1 B1 -S F2 B2 -S F3 B3 -S ...

    No bubble in the steady state; stage s holds the activations of p-s microbatches and at most p-s
    weight versions. With an update every k microbatches, stage s gives microbatch i the version
    max(0, (i - (p-1-s)) // k) in forward and in backward (weight stashing), and the gradients of k
    microbatches, averaged, go to the latest version.

    ``microbatches`` counts those of the whole stream: warm-up and cooldown happen once.

    Source: Narayanan et al., PipeDream (SOSP 2019), sections 3.2 and 3.3.
    """
    warmup = min(ranks - 1 - rank, microbatches)
    for microbatch in range(warmup):
        yield forward(rank, microbatch)
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield forward(rank, warmup + microbatch)
        yield backward(rank, microbatch)
        if (microbatch + 1) % update_every == 0:
            yield step(rank, microbatch // update_every)
