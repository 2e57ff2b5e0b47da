"""GPipe: all forwards, then all backwards, then the step."""

from collections.abc import Iterator

from vpipe.schedules.kinds import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


def backwards_of(microbatches: int, slices: int) -> Iterator[int]:
    """Yield the indices of backwards, microbatch after microbatch, the slices of each from its last."""
    for microbatch in range(microbatches):
        yield from reversed(range(microbatch * slices, (microbatch + 1) * slices))


@register_schedule("gpipe", flush=True, peak_activations=lambda rank, size: size.microbatches * size.slices,
                   reversible=True, sliced=True, planned=True)
def gpipe(rank: int, ranks: int, microbatches: int, slices: int = 1) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; B takes twice as long as F, S is the step.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 -S
        rank 1  .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -S
        rank 2  .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -S

    Bubble (p-1)(F+B) with B a whole backward; every stage holds the activations of all m microbatches.
    Backward runs in the order of forward, which is the order in which plain PyTorch accumulates gradients.

    With n slices of every microbatch the bubble is an n-th of that. The slices of a microbatch go back from its last.

    Source: Huang et al., GPipe (arXiv:1811.06965), section 2.3; of slices, Li et al., TeraPipe (arXiv:2102.07988),
    section 3.2.
    """
    for index in range(microbatches * slices):
        yield forward(rank, index)
    for index in backwards_of(microbatches, slices):
        yield backward(rank, index)
    yield step(rank, 0)
