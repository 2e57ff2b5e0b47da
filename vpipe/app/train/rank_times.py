"""Report the times of every rank every few updates: in ``rank_times.jsonl``, and to who asks in logs and on the screen.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Self

from vpipe import Pipeline
from vpipe.app.train.metrics import LineWriter, finite
from vpipe.app.train.observers import Observer, Run
from vpipe.app.train.run_folder import RANK_TIMES
from vpipe.app.visualize.table import fitted, ms_text, terminal_columns
from vpipe.distributed import exchange
from vpipe.runtime import StageUsage
from vpipe.units import size_text

FIGURES = {"forward_s": "forward", "backward_s": "backward", "step_s": "step", "communication_s": "comm",
           "idle_s": "idle", "others_s": "other", "bytes_sent": "sent"}
"""Fields of :class:`~vpipe.runtime.stage_usage.StageUsage`, reported as means per update, with their heads."""

UNASKED, AFTER_S = 10, 5.0
"""Updates between reports where nobody asked for them, and seconds between those that are written for a live view."""

log = logging.getLogger("vpipe")


class _Report(NamedTuple):
    """The figures of several updates on their way to rank 0."""

    first: int
    last: int
    gathered: Callable[[], list[dict[str, list[float]]]]


class RankTimes(Observer):
    """Report every ``metrics.rank_times_every`` updates. All ranks make one, and call it after the same updates.

    Without that key some are only written into ``rank_times.jsonl``, for ``vpipe watch``. No rank waits for another:
    each sends its figures to rank 0, which shows them when all must have arrived.

    Args:
        folder: of the run.
        note: shows a report that was asked for.
        every: updates between two reports; None where nobody asked.
        done: updates of earlier attempts.
    """

    def __init__(self, folder: Path, pipe: Pipeline, note: Callable[[str], None], every: int | None = None,
                 done: int = 0, step_name: str = "update") -> None:
        self._pipe, self._note, self._step_name = pipe, note, step_name
        self._asked, self._every = every is not None, every or UNASKED
        self._wrote_s = float("-inf")
        self._exchange = exchange(timeout_s=pipe.description.transfers.timeout_s)
        # All ranks have sent their figures so many updates later: without a flush one is ahead by a few at most.
        self._lead = 1 if pipe.lowered.flush else 2 * len(pipe.placement)
        self._pending: deque[_Report] = deque()
        self._reported = done
        self._before = self._pipe.local_usage()
        self._file = LineWriter(folder / RANK_TIMES, truncate=True) if pipe.rank == 0 else None

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        job = run.job
        return cls(run.folder, run.pipe, run.note, job.config.metrics.rank_times_every, job.steps_done, job.step_name)

    def step(self, done: int) -> None:
        """Report if due after ``done`` updates, those of earlier attempts included."""
        while self._pending and self._pending[0].last + self._lead <= done:
            self._show(self._pending.popleft())
        if done // self._every > self._reported // self._every:
            self._report(done)

    def end(self) -> None:
        """Show the reports that are pending, after the last update."""
        while self._pending:
            self._show(self._pending.popleft())

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            self._file.close()

    def _report(self, done: int) -> None:
        usage, steps = self._pipe.local_usage(), done - self._reported
        here = {}
        for place, stages in usage.items():
            spent = StageUsage.of_rank([own.since(self._before[place][stage]) for stage, own in stages.items()])
            rank = place * self._pipe.lanes + self._pipe.lane
            here[str(rank)] = [getattr(spent, name) / steps for name in FIGURES]
            if self._asked:
                heads, (texts,) = figure_texts([here[str(rank)]])
                cells = ", ".join(map(" ".join, zip(heads, texts, strict=True)))
                log.info("rank %d, %s: %s", rank, self._title(self._reported + 1, done), cells)
        gathered = self._exchange.gather(here, "sharing where its time went")
        self._pending.append(_Report(self._reported + 1, done, gathered))
        self._reported, self._before = done, usage

    def _show(self, report: _Report) -> None:
        found = {int(rank): values for here in report.gathered() for rank, values in here.items()}
        if self._file is None or (not self._asked and perf_counter() - self._wrote_s < AFTER_S):
            return
        self._wrote_s = perf_counter()
        self._file.write(json.dumps({
            "first_step": report.first - 1, "last_step": report.last - 1,
            "ranks": [{"rank": rank, **dict(zip(FIGURES, (finite(float(f"{value:.6g}")) for value in values),
                                                strict=True))} for rank, values in found.items()]}))
        if not self._asked:
            return
        heads, cells = figure_texts(list(found.values()))
        rows = [[str(rank), " ".join(str(stage) for stage, places in enumerate(self._pipe.placement)
                                     if rank // self._pipe.lanes in places), *texts]
                for rank, texts in zip(found, cells, strict=True)]
        self._note("\n".join([f"{self._title(report.first, report.last)}:",
                              *fitted(("rank", "stage", *heads), rows, terminal_columns(), names=2)]))

    def _title(self, first: int, last: int) -> str:
        name = self._step_name
        return f"{name}s {first} to {last}, in milliseconds per {name}"


def figure_texts(rows: Sequence[Sequence[float]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads, and the texts of each row's :data:`FIGURES`; packages' kinds have a column if they took any."""
    shown = {at: head for at, head in enumerate(FIGURES.values()) if head != "other" or any(row[at] for row in rows)}
    return [*shown.values()], [[size_text(row[at]) if head == "sent" else ms_text(row[at])
                                for at, head in shown.items()] for row in rows]
