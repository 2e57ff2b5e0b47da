"""Gate the kernels of a run's microbatches by the Orion scheduler, and report what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vpipe import Pipeline
from vpipe.app.errors import StartError
from vpipe.app.train.job import Job
from vpipe.app.visualize.table import fitted, terminal_columns
from vpipe.distributed import Exchange, exchange
from vpipe.errors import counted
from vpipe.extras.orion.scheduler import Inactive, Launch, OrionScheduler, start


class Orion:
    """The scheduler on all ranks of a run: it is active on every rank or on none.

    Attributes:
        inactive: why it is not, on the first rank that cannot start it.
    """

    def __init__(self, scheduler: OrionScheduler | None, inactive: Inactive | None, rank: int, exchange: Exchange,
                 clients: int) -> None:
        self._scheduler, self.inactive, self._clients = scheduler, inactive, clients
        self._rank, self._exchange = rank, exchange

    def figures(self) -> dict[str, Any]:
        """Return what each client of each rank did, for ``metrics.jsonl``. All ranks must call it."""
        if self.inactive is not None:
            return {"active": False, **self.inactive._asdict()}
        assert self._scheduler is not None, "it is active"
        own = {**self._scheduler.totals(), "rank": self._rank,
               "microbatches": [self._scheduler.client_stats(client) for client in range(self._clients)]}
        return {"active": True, "ranks": self._exchange.all_gather(own)}


def _first_inactive(votes: Sequence[str]) -> str:
    """Return the reason and remedy of the first rank that has one, named unless all ranks have the same."""
    rank = next((rank for rank, vote in enumerate(votes) if vote), None)
    if rank is None:
        return ""
    reason, remedy = json.loads(votes[rank])
    return json.dumps([reason if len(set(votes)) == 1 else f"rank {rank}: {reason}", remedy])


@contextmanager
def orion(job: Job, pipe: Pipeline) -> Iterator[Orion | None]:
    """Start the scheduler on every rank, let the pipeline's microbatches use it, and stop it at the end; None where
    the config does not ask for it. All ranks must call it.

    Raises:
        StartError: ``parallel.orion_strict`` is true, and the scheduler cannot be active.
    """
    parallel = job.config.parallel
    if not parallel.use_orion_scheduler:
        yield None
        return
    device = pipe.device
    clients = _microbatches_of_rank(job)
    own = start(Launch(device.type, device.index or 0, clients))
    scheduler = own if isinstance(own, OrionScheduler) else None
    try:
        others = exchange(timeout_s=parallel.timeout_s)
        found = others.agree(json.dumps(own) if isinstance(own, Inactive) else "", _first_inactive)
        inactive = Inactive(*json.loads(found)) if found else None
        if inactive is not None and parallel.orion_strict:
            raise StartError(f"Orion is inactive: {inactive.reason}",
                             hint=f"{inactive.remedy}; or set parallel.orion_strict: false")
        if inactive is None and scheduler is not None:
            pipe.schedule_kernels(scheduler)
        yield Orion(scheduler, inactive, pipe.rank, others, clients)
    finally:
        if scheduler is not None:
            scheduler.stop()


def _microbatches_of_rank(job: Job) -> int:
    """Return the most microbatches that one rank has in a batch: replicas of a stage share them."""
    return -(-job.schedule.microbatches // min(map(len, job.placement)))


def orion_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of the summary: a row per microbatch, summed over the ranks.

    Args:
        figures: see :meth:`Orion.figures`.
    """
    if not figures["active"]:
        return [str(Inactive(figures["reason"], figures["remedy"]))]
    ranks = figures["ranks"]
    rows = []
    for client, of_ranks in enumerate(zip(*(rank["microbatches"] for rank in ranks), strict=True)):
        grants, waits, starved, waited_ns = (sum(stats[key] for stats in of_ranks)
                                             for key in ("submitted", "queued", "starved", "wait_ns"))
        longest_ns = max(stats["max_wait_ns"] for stats in of_ranks)
        rows.append([str(client), f"{grants:,}", f"{waits:,}", f"{starved:,}", f"{waited_ns / 1e6:,.1f} ms",
                     f"{longest_ns / 1e6:,.2f} ms"])
    titles = ["microbatch", "grants", "waits", "starved", "waited", "longest"]
    idle = [str(rank["rank"]) for rank in ranks if not rank["gated"]]
    warning = f"warning: no kernel came through the gate on {counted(len(idle), 'rank')} ({', '.join(idle)})"
    return [f"orion: active on {counted(len(ranks), 'rank')}", *fitted(titles, rows, terminal_columns(), names=1),
            *([warning] if idle else [])]
