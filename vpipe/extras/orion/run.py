"""Gate the kernels of a run's microbatches by the Orion scheduler, and report what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from vpipe.app.errors import StartError
from vpipe.app.train.observers import Observer, Run, SummaryPart
from vpipe.app.visualize.table import fitted, terminal_columns
from vpipe.distributed import exchange
from vpipe.errors import counted
from vpipe.extras.orion.scheduler import Inactive, OrionScheduler, start


class Orion(Observer):
    """Start the scheduler on every rank of a run, let the pipeline's microbatches use it, and stop it at the end.

    It is active on every rank or on none.

    Raises:
        StartError: ``parallel.orion_strict`` is true, and the scheduler cannot be active.
    """

    def __init__(self, run: Run) -> None:
        parallel, device = run.job.config.parallel, run.pipe.device
        # The most microbatches that one rank has in a batch: replicas of a stage share them.
        schedule = run.job.schedule
        self._rank, self._clients = run.pipe.rank, -(-schedule.microbatches // min(map(len, schedule.placement)))
        own = start(device.type, device.index or 0, self._clients)
        self._scheduler = own if isinstance(own, OrionScheduler) else None
        try:
            self._exchange = exchange(timeout_s=parallel.timeout_s)
            found = self._exchange.agree(json.dumps(own) if isinstance(own, Inactive) else "", _first_inactive)
            self._inactive = Inactive(*json.loads(found)) if found else None  # of the first rank that cannot start it
            if self._inactive is not None and parallel.orion_strict:
                raise StartError(f"Orion is inactive: {self._inactive.reason}",
                                 hint=f"{self._inactive.remedy}; or set parallel.orion_strict: false")
            if self._inactive is None and self._scheduler is not None:
                run.pipe.schedule_kernels(self._scheduler)
        except BaseException:
            self._stop()
            raise
        if self._inactive is not None and self._rank == 0:
            run.note(f"warning: {self._inactive}")

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        return cls(run) if run.job.config.parallel.use_orion_scheduler else None

    def summary(self) -> SummaryPart:
        """Return what each client of each rank did."""
        figures: dict[str, Any] = {"active": False, **self._inactive._asdict()} if self._inactive is not None else {}
        if self._inactive is None:
            assert self._scheduler is not None, "it is active"
            own = {**self._scheduler.totals(), "rank": self._rank,
                   "microbatches": [self._scheduler.client_stats(client) for client in range(self._clients)]}
            figures = {"active": True, "ranks": self._exchange.all_gather(own)}
        return SummaryPart(orion_lines(figures), {"orion": figures})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()


def _first_inactive(votes: Sequence[str]) -> str:
    """Return the reason and remedy of the first rank that has one, named unless all ranks have the same."""
    rank = next((rank for rank, vote in enumerate(votes) if vote), None)
    if rank is None:
        return ""
    reason, remedy = json.loads(votes[rank])
    return json.dumps([reason if len(set(votes)) == 1 else f"rank {rank}: {reason}", remedy])


def orion_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of the summary: a row per microbatch, summed over the ranks.

    Args:
        figures: of :meth:`Orion.summary`.
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
