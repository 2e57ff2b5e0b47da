"""Where the time of every rank goes, each few updates: in its log, on the screen, and in ``rank_times.jsonl``."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.pipeline import Pipeline
from vpipe.runtime.transport.broadcast import transferring_with
from vpipe.runtime.transport.process_groups import control_group
from vpipe.runtime.usage import StageUsage
from vpipe.schedules.schedule import stages_of_rank
from vpipe.train.job import Job
from vpipe.train.metrics import Lines, finite
from vpipe.train.run_folder import RANK_TIMES
from vpipe.units import size_text
from vpipe.visualize.table import fitted, ms_text, terminal_columns

FIGURES = ("forward_s", "backward_s", "step_s", "communication_s", "idle_s", "bytes_sent")
"""Of :class:`~vpipe.runtime.usage.StageUsage`, each the mean of one update."""

_HEADS = ("forward", "backward", "step", "comm", "idle", "sent")

log = logging.getLogger("vpipe")


@dataclass(frozen=True)
class _Sent:
    """The figures of some updates, on their way to rank 0.

    Attributes:
        first, last: of the updates, counted from 1.
        gathered: the figures.
        due: once so many updates are done, every rank has sent them.
    """

    first: int
    last: int
    gathered: Gather
    due: int


class RankTimes:
    """Reports every ``metrics.rank_times_every`` updates; never, and at no cost, where that is null.

    All ranks make this object, and call it after the same updates. Nobody waits for anybody: a rank sends its figures
    to rank 0 and goes on; rank 0 shows them when every rank must have sent them.

    Args:
        note: shows some lines on rank 0.
    """

    def __init__(self, job: Job, pipe: Pipeline, folder: Path, note: Callable[[str], None]) -> None:
        self._job, self._pipe, self._note = job, pipe, note
        self._every = job.config.metrics.rank_times_every
        # A rank is ahead of another by a few updates at most, and with a flush by none.
        self._behind = 1 if job.schedule.flush else 2 * len(job.placement)
        self._under_way: deque[_Sent] = deque()
        self._reported = job.steps_done
        self._before = self._usage() if self._every is not None else {}
        self._file = Lines(folder / RANK_TIMES, anew=True) if self._every is not None and pipe.rank == 0 else None

    def step(self, done: int) -> None:
        """So many updates are done, with those of earlier attempts."""
        if self._every is None:
            return
        while self._under_way and self._under_way[0].due <= done:
            self._show(self._under_way.popleft())
        if done // self._every > self._reported // self._every:
            self._report(done)

    def end(self) -> None:
        """The last update is done: show what is still to be shown."""
        while self._under_way:
            self._show(self._under_way.popleft())

    def close(self) -> None:
        """Write no more, also of a run that failed."""
        if self._file is not None:
            self._file.close()

    def _usage(self) -> Mapping[int, Mapping[int, StageUsage]]:
        return self._pipe.engine.collectives.local_usage()

    def _report(self, done: int) -> None:
        usage, steps = self._usage(), done - self._reported
        here = {}
        for rank, stages in usage.items():
            spent = StageUsage.of_rank([own.since(self._before[rank][stage]) for stage, own in stages.items()])
            here[rank] = torch.tensor([getattr(spent, name) / steps for name in FIGURES], dtype=torch.float64)
            cells = ", ".join(map(" ".join, zip(_HEADS, _cells(here[rank]), strict=True)))
            log.info("rank %d, %s: %s", rank, self._title(self._reported + 1, done), cells)
        gathered = Gather(here, self._pipe.rank, self._job.schedule.ranks, "sharing where its time went")
        self._under_way.append(_Sent(self._reported + 1, done, gathered, done + self._behind))
        self._reported, self._before = done, usage

    def _show(self, sent: _Sent) -> None:
        found = sent.gathered.finish(self._job.config.parallel.timeout_s)
        if self._file is None:
            return
        self._file.write(json.dumps({
            "first_step": sent.first - 1, "last_step": sent.last - 1,
            "ranks": [{"rank": rank, **dict(zip(FIGURES, (finite(float(f"{value:.6g}")) for value in values.tolist()),
                                                strict=True))} for rank, values in found.items()]}))
        rows = [[str(rank), " ".join(map(str, stages_of_rank(self._job.placement, rank))), *_cells(values)]
                for rank, values in found.items()]
        self._note("\n".join([f"{self._title(sent.first, sent.last)}:",
                              *fitted(("rank", "stage", *_HEADS), rows, terminal_columns(), names=2)]))

    def _title(self, first: int, last: int) -> str:
        name = self._job.step_name
        return f"{name}s {first} to {last}, in milliseconds per {name}"


def _cells(figures: Tensor) -> list[str]:
    *seconds, sent = figures.tolist()
    return [*map(ms_text, seconds), size_text(sent)]


class Gather:
    """Sends what this process has to rank 0; on rank 0, gets ready to receive it. All ranks make this object.

    Args:
        here: by rank of this process, a tensor of one shape on all ranks, in host memory.
        rank: of this process.
        ranks: how many there are.
        about: what the ranks do with each other, for messages.
    """

    def __init__(self, here: Mapping[int, Tensor], rank: int, ranks: int, about: str) -> None:
        self._tensors, self._about = dict(here), about
        self._work: dict[int, dist.Work] = {}
        if len(here) == ranks:
            return  # all are in this process
        for peer in range(1, ranks) if rank == 0 else [0]:
            with transferring_with(peer, about):
                if rank:
                    work = dist.isend(here[rank], peer, control_group())
                else:
                    self._tensors[peer] = torch.empty_like(here[0])
                    work = dist.irecv(self._tensors[peer], peer, control_group())
            assert work is not None, "this rank is in the group"
            self._work[peer] = work

    def finish(self, timeout_s: float) -> dict[int, Tensor]:
        """Wait until what is under way has arrived; the tensors by rank: of all on rank 0, else of this process.

        Raises:
            RunError: a rank is gone, or did not send in time.
        """
        for peer, work in self._work.items():
            with transferring_with(peer, self._about):
                work.wait(timedelta(seconds=timeout_s))
        self._work.clear()
        return dict(sorted(self._tensors.items()))
