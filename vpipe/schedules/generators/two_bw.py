"""PipeDream-2BW: 1F1B without a flush that holds two weight versions, however deep the pipeline."""

from collections.abc import Iterator, Sequence

from vpipe.schedules.action import Action
from vpipe.schedules.generators.pipedream import in_flight, pipedream, with_versions
from vpipe.schedules.registry import register_schedule


@register_schedule("2bw", flush=False, peak_activations=in_flight, versions=lambda rank, size: 2,
                   update_every=lambda ranks: ranks,
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
