"""1F1B: one forward, one backward, with a flush; Seq1F1B: the same of slices of sequences."""

from collections.abc import Iterable, Iterator
from itertools import islice

from vpipe.schedules.generators.gpipe import backwards_of
from vpipe.schedules.kinds import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


@register_schedule("1f1b", flush=True, planned=True,
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


@register_schedule("seq1f1b", flush=True, sliced=True, peak_activations=lambda rank, size: min(
    size.ranks - rank + size.slices - 1, size.microbatches * size.slices))
def seq1f1b(rank: int, ranks: int, microbatches: int, slices: int = 1) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; here with two slices of every microbatch, so that F2 and F3
    are those of the second microbatch. B takes twice as long as F, S is the step.

    ::

        rank 0  F0 F1 F2 F3 .  .  .  .  B1 -- .  B0 -- .  B3 -- B2 -S
        rank 1  .  F0 F1 F2 .  .  B1 -- F3 B0 -- .  B3 -- B2 -S
        rank 2  .  .  F0 F1 B1 -- F2 B0 -- F3 B3 -- B2 -S

    The slices of a microbatch go forward from the first, since a token sees those before it, and back from the last,
    since a key gets a gradient from every token behind it. So n - 1 forwards more than in 1F1B precede the first
    backward. Bubble (p-1)(F+B)/n with F and B the times of a whole microbatch, an n-th of 1F1B's; stage s holds the
    activations of min(p-s+n-1, m n) slices, an n-th of a microbatch each. With one slice this is 1F1B.

    Source: Sun et al., Seq1F1B (arXiv:2406.03488), section 3.2.
    """
    forwards = [(rank, index) for index in range(microbatches * slices)]
    backwards = [(rank, index) for index in backwards_of(microbatches, slices)]
    yield from one_forward_one_backward(forwards, backwards, ranks - 1 - rank + slices - 1)
    yield step(rank, 0)


def one_forward_one_backward(forwards: Iterable[tuple[int, int]], backwards: Iterable[tuple[int, int]],
                             warmup: int) -> Iterator[Action]:
    """Yield ``warmup`` forwards, then forwards and backwards in turn, each given by its stage and microbatch."""
    ahead = (forward(*turn) for turn in forwards)
    yield from islice(ahead, warmup)
    for turn in backwards:
        yield from islice(ahead, 1)
        yield backward(*turn)
