"""1F1B: one forward, one backward, with a flush."""

from collections.abc import Iterable, Iterator
from itertools import islice

from vpipe.schedules.action import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


@register_schedule("1f1b", flush=True,
                   peak_activations=lambda rank, size: min(size.ranks - rank, size.microbatches))
def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; B takes twice as long as F, S is the step.

    ::

        rank 0  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 -S
        rank 1  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -S
        rank 2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -S

    Bubble (p-1)(F+B) with B a whole backward, as GPipe, but stage s holds the activations of only
    min(p-s, m) microbatches.

    Source: Narayanan et al., PipeDream-Flush (arXiv:2006.09503), section 3.2; Megatron-LM
    (arXiv:2104.04473), section 2.2.
    """
    turns = [(rank, microbatch) for microbatch in range(microbatches)]
    yield from one_forward_one_backward(turns, turns, ranks - 1 - rank)
    yield step(rank, 0)


def one_forward_one_backward(forwards: Iterable[tuple[int, int]], backwards: Iterable[tuple[int, int]],
                             warmup: int) -> Iterator[Action]:
    """Yield ``warmup`` forwards, then forwards and backwards in turn, each given by its stage and microbatch."""
    ahead = (forward(*turn) for turn in forwards)
    yield from islice(ahead, warmup)
    for turn in backwards:
        yield from islice(ahead, 1)
        yield backward(*turn)
