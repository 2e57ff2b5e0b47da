"""Another number of ranks than a config was written for: ``elastic: true``."""

from __future__ import annotations

from fractions import Fraction

from vpipe.config.config import Config
from vpipe.config.parallel import AUTO
from vpipe.errors import UserError, counted
from vpipe.launch.checks import ranks_of
from vpipe.schedules.prepare import is_file


def fitted(config: Config, ranks: int) -> Config:
    """The config for another number of ranks; the batches, the learning rate and the schedule stay.

    The pipeline keeps its length and gets another number of replicas where that comes out even, else it keeps the
    replicas, else it becomes one pipeline of all ranks. Its stages are cut anew, by measurement when the run starts,
    and so is what is recomputed where that was written stage by stage. Ranks that were assigned to stages are assigned
    as the schedule does. Without a flush each replica counts its own microbatches of an update: their number changes so
    that an update keeps its samples, where that comes out even.

    Raises:
        UserError: the config says what cannot be carried over.
    """
    parallel = config.parallel
    if is_file(parallel.schedule):
        raise UserError(f"elastic: {counted(ranks, 'rank')} are there, but the schedule is a file, "
                        f"'{parallel.schedule}', which is for {ranks_of(config)}", hint="name a schedule, or give it "
                        "the ranks that it has")
    if isinstance(parallel.compress, tuple) and len(set(parallel.compress)) > 1:
        raise UserError(f"elastic: {counted(ranks, 'rank')} are there, but parallel.compress says for each of "
                        f"{len(parallel.compress)} cuts how tensors travel", hint="write one word for all cuts")
    even = parallel.stage_to_rank_map is None  # all stages have as many replicas
    replicas = parallel.data_parallel_size if even else 1
    length = ranks_of(config) // replicas  # ranks of one pipeline
    per_rank = max(1, parallel.model_parallel_size // length)
    if even and ranks % length == 0:
        replicas = ranks // length
    elif ranks % replicas:
        replicas = 1
    compress = parallel.compress[0] if isinstance(parallel.compress, tuple) else parallel.compress
    every = parallel.update_every
    if even and every is not None:
        same = Fraction(every * parallel.data_parallel_size, replicas)
        if same.denominator == 1 and config.training.num_microbatches % same.numerator == 0:
            every = same.numerator
    fit = config.with_parallel(
        model_parallel_size=per_rank * (ranks // replicas), data_parallel_size=replicas, stage_to_rank_map=None,
        partition=AUTO, recompute=AUTO if isinstance(parallel.recompute, tuple) else parallel.recompute,
        warmup_depth=None, compress=compress, plan=None, update_every=every)
    there = ranks_of(fit)  # proves that there is such a schedule
    assert there == ranks, f"{there} ranks instead of {ranks}"
    return fit


def other_updates(config: Config, fit: Config) -> str | None:
    """What is to be said where an update of the config for another number of ranks has another number of samples."""
    before, now = (None if c.parallel.update_every is None or c.parallel.stage_to_rank_map is not None else
                   c.parallel.update_every * c.parallel.data_parallel_size for c in (config, fit))
    if before is None or now is None or before == now:
        return None
    return (f"an update has {counted(now, 'microbatch')} instead of {before}, at the same learning rate, and "
            "training.max_steps counts updates")
