"""PipeDream: 1F1B without a flush; every microbatch, or every few, updates at once. PipeDream-2BW: two versions."""

from collections.abc import Callable, Iterator, Sequence

from vpipe.errors import Problem
from vpipe.schedules.assignment import Size
from vpipe.schedules.generators.one_f_one_b import one_forward_one_backward
from vpipe.schedules.kinds import Action, Op, step, use
from vpipe.schedules.registry import register_schedule


def in_flight(rank: int, size: Size) -> int:
    """Return the most microbatches whose activations a rank holds."""
    return min(size.warmup_of(rank) + 1, size.microbatches)


@register_schedule("pipedream", flush=False, peak_activations=in_flight,
                   versions=lambda rank, size: 1 - -size.warmup_of(rank) // size.update_every,
                   version_of=lambda i, stage, widths, k, warmup: max(0, (i // widths[stage] - warmup[stage]) // k),
                   any_warmup=True, planned=True)
def pipedream(rank: int, ranks: int, microbatches: int, update_every: int = 1,
              warmup: Sequence[int] = ()) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; B takes twice as long as F and ends with the step S,
    which makes the next weight version.

    ::

        rank 0  F0 F1 F2 .  .  .  .  B0 -S F3 B1 -S F4 B2 -S F5 B3 -S F6 B4 ...
        rank 1  .  F0 F1 .  .  B0 -S F2 B1 -S F3 B2 -S F4 B3 -S F5 B4 -S F6 ...
        rank 2  .  .  F0 B0 -S F1 B1 -S F2 B2 -S F3 B3 -S F4 B4 -S F5 B5 -S ...

    No bubble in the steady state; stage s of p holds the activations of p-s microbatches. With an update
    every k microbatches, stage s gives microbatch i (both from 0) the version max(0, (i - (p-1-s)) // k) in forward
    and in backward (weight stashing), and the gradients of k microbatches, averaged, go to the latest
    version; a stage holds at most 1 + (p-1-s)/k versions, rounded up, which is p-s for k = 1.

    The forwards of a stage before its first backward, d = p-1-s, may be more (``warmup``, per rank), so that forwards
    wait for no transfer: then a stage holds the activations of d+1 microbatches and the version is
    max(0, (i - d) // k).

    ``microbatches`` counts those of the whole stream: warm-up and cooldown happen once.

    Source: Narayanan et al., PipeDream (SOSP 2019), sections 3.2 and 3.3.
    """
    forwards, backwards = (((rank, microbatch) for microbatch in range(microbatches)) for _ in range(2))
    for action in one_forward_one_backward(forwards, backwards, warmup[rank] if warmup else ranks - 1 - rank):
        yield action
        if action.op is Op.BACKWARD and (action.microbatch + 1) % update_every == 0:
            yield step(rank, action.microbatch // update_every)


def _even(size: Size) -> Problem | None:
    return None if size.even else Problem(
        "'pipedream_vertical_sync' gives a microbatch the same version on every stage, but stages with more replicas "
        "make fewer updates", "give all stages equally many replicas, or use pipedream")


@register_schedule("pipedream_vertical_sync", flush=False, peak_activations=in_flight,
                   versions=lambda rank, size: 1 - -size.warmup_of(0) // size.update_every, requires=_even,
                   version_of=lambda i, stage, widths, k, warmup: max(0, (i // widths[stage] - warmup[0]) // k),
                   any_warmup=True)
def pipedream_vertical_sync(rank: int, ranks: int, microbatches: int, update_every: int = 1,
                            warmup: Sequence[int] = ()) -> Iterator[Action]:
    """Yield the actions of :func:`pipedream`, but with one version per microbatch on every stage; a bar stands where
    forwards change over to the next one.

    ::

        rank 0  F0 F1 F2 .  .  .  .  B0 -S F3 B1 -S F4 B2 -S F5 B3 -S F6 B4 ...
        rank 1  .  F0 F1 .  .  B0 -S F2 B1 -S|F3 B2 -S|F4 B3 -S|F5 B4 -S|F6 ...
        rank 2  .  .  F0 B0 -S F1 B1 -S F2 B2 -S|F3 B3 -S|F4 B4 -S|F5 B5 -S ...

    The version of microbatch i is that which stage 0 has by then, max(0, (i - (p-1)) // k), so stage 0 always takes its
    latest and the others hold all versions from there to their latest: at most 1 + (p-1)/k, rounded up, on every stage.
    With a ``warmup`` its depth of stage 0 takes the place of p-1. Everything else is as in PipeDream.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3, "vertical sync".
    """
    plain = pipedream(rank, ranks, microbatches, update_every, warmup)
    if rank == 0:
        return plain
    ahead = warmup[0] if warmup else ranks - 1
    return with_versions(plain, rank, lambda microbatch: max(0, (microbatch - ahead) // update_every))


def with_versions(program: Iterator[Action], rank: int, version_of: Callable[[int], int]) -> Iterator[Action]:
    """Yield PipeDream's program with forwards that use ``version_of(microbatch)`` instead of the latest version."""
    yield use(rank, 0)
    used = due = 0  # versions, of the last forward and of the next
    for action in program:
        if action.op is not Op.BACKWARD and used < due:  # also before a step, which would make one version too many
            yield use(rank, due)
            used = due
        if action.op is Op.FORWARD:
            due = version_of(action.microbatch + 1)
        yield action


@register_schedule("2bw", flush=False, peak_activations=in_flight, versions=lambda rank, size: 2,
                   update_every=lambda ranks: ranks, planned=True,
                   version_of=lambda i, stage, widths, k, warmup: max(0, i // widths[stage] // k - 1), any_warmup=True)
def two_bw(rank: int, ranks: int, microbatches: int, update_every: int,
           warmup: Sequence[int] = ()) -> Iterator[Action]:
    """Yield the actions of one rank, one stage per rank; here p = 2, k = 2. B takes twice as long as F and ends with
    the step S when it completes an update; a bar stands where forwards change over to the next weight version.

    ::

        rank 0  F0 F1 .  .  B0 -- F2 B1 -S F3 B2 --|F4 B3 -S F5 B4 --|F6 B5 ...
        rank 1  .  F0 B0 -- F1 B1 -S F2 B2 -- F3 B3 -S|F4 B4 -- F5 B5 -S|F6 ...

    No bubble in the steady state; stage s of p holds the activations of p-s microbatches. With an update every k >= p
    microbatches, microbatch i (both from 0) uses version max(0, i // k - 1) in forward and in backward, on every stage:
    one update older than the latest, so that a stage holds two versions, the one in use and the next. The version after
    these is made when no microbatch needs the older one any more, which is why k must be p or more;
    with a ``warmup``, more than its depth of stage 0.

    ``microbatches`` counts those of the whole stream: warm-up and cooldown happen once.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (arXiv:2006.09503), section 3.1.
    """
    plain = pipedream(rank, ranks, microbatches, update_every, warmup)
    return with_versions(plain, rank, lambda microbatch: max(0, microbatch // update_every - 1))
