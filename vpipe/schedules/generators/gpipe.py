"""GPipe: all forwards, then all backwards, then the step."""

from collections.abc import Iterator

from vpipe.schedules.action import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


@register_schedule("gpipe", flush=True, peak_activations=lambda rank, size: size.microbatches, reversible=True)
def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; B takes twice as long as F, S is the step.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 -S
        rank 1  .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -S
        rank 2  .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -S

    Bubble (p-1)(F+B) with B a whole backward; every stage holds the activations of all m microbatches.
    Backward runs in the order of forward, which is the order in which plain PyTorch accumulates gradients.

    Source: Huang et al., GPipe (arXiv:1811.06965), section 2.3.
    """
    for microbatch in range(microbatches):
        yield forward(rank, microbatch)
    for microbatch in range(microbatches):
        yield backward(rank, microbatch)
    yield step(rank, 0)
