"""``trace/rank<N>.jsonl`` in the folder of a run: what each rank did when. ``vpipe trace`` reads it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import IO

import torch.distributed as dist

from vpipe.errors import UserError
from vpipe.pipeline import Pipeline
from vpipe.runtime.trace import MOST_ACTIONS, Recorder
from vpipe.runtime.transport.broadcast import clock_offset
from vpipe.schedules.prepare import has_flush

log = logging.getLogger("vpipe")

FORMAT = 1
AT_ONCE, AFTER_S = 4096, 5.0
"""So many notes are worth writing down between two steps, which takes 10 ms; or what there is after so many seconds:
what was not written is lost with a rank that is killed."""


class Trace:
    """Records a pipeline, one file for each of its ranks that is in this process.

    A file begins with an object that describes the run (:meth:`_header` says how). Then come, in order, the actions
    and evaluations as :mod:`vpipe.runtime.trace` writes them; ``{"clock": [at_s, offset_s]}`` when the clocks were
    compared, at the start and at a good end: what to add to this rank's to have rank 0's; and ``{"truncated": true}``
    at the end of a run of which only the beginning is recorded. Written between steps, from the first one on, and at
    the end, also that of a run that fails: a file is whole lines. A rank that is ended from outside (Ctrl-C, a kill)
    leaves out what it did since it last wrote, some seconds.

    Args:
        folder: of the run; None records nothing.
        pipe: not trained yet. All ranks make this object together.
        samples_per_step: for the reader.
        limit: how many actions of a rank are noted.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path | None, pipe: Pipeline, samples_per_step: int, limit: int = MOST_ACTIONS) -> None:
        self._pipe, self._samples = pipe, samples_per_step
        self._recorders: Mapping[int, Recorder] = {} if folder is None else pipe.engine.record(limit)
        self._files: dict[int, IO[str]] = {}
        self._full: set[int] = set()
        if folder is None:
            return
        try:
            (folder / "trace").mkdir(exist_ok=True)
            self._files = {rank: (folder / "trace" / f"rank{rank}.jsonl").open("w", encoding="utf-8")
                           for rank in self._recorders}
        except OSError as error:
            raise UserError(f"cannot write the timeline of the run in '{folder / 'trace'}': {error.strerror}",
                            hint="make room there, or set trace to false") from None
        self._clocks = [self._compared()]
        self._wrote_s = dict.fromkeys(self._files, float("-inf"))

    def step(self) -> None:
        """Between two steps of training: write what waits, if it is much."""
        for rank in list(self._files):
            recorder = self._recorders[rank]
            if recorder.waiting >= AT_ONCE or (recorder.waiting and perf_counter() - self._wrote_s[rank] > AFTER_S):
                self._write(rank)
            if recorder.full and rank not in self._full:
                self._full.add(rank)
                log.info("the timeline of rank %d ends here: it holds %s actions, the most that are recorded", rank,
                         f"{recorder.count:,}")

    def end(self) -> None:
        """The run has ended well: compare the clocks once more. All ranks call it."""
        if self._recorders:
            self._clocks.append(self._compared())

    def _compared(self) -> tuple[float, float]:
        """When, on this rank's clock, and what to add to it."""
        offset_s = clock_offset() if dist.is_initialized() else 0.0
        return perf_counter(), offset_s

    def _write(self, rank: int, *closing: str) -> None:
        """In one piece, so that what is ended from outside leaves whole lines. A full disk ends the record alone."""
        file, recorder = self._files[rank], self._recorders[rank]
        try:
            lines = [] if file.tell() else [json.dumps(self._header(rank)), _clock(*self._clocks[0])]
            file.write("".join(f"{line}\n" for line in [*lines, *recorder.take(), *closing]))
            file.flush()
        except OSError as error:
            recorder.stop()
            del self._files[rank]
            with suppress(OSError):  # what could not be written is tried once more
                file.close()
            log.warning("the timeline of rank %d breaks off, training goes on: cannot write %s: %s", rank, file.name,
                        error.strerror)
        self._wrote_s[rank] = perf_counter()

    def _header(self, rank: int) -> dict[str, object]:
        """What a reader needs to know of the run, and of this rank. Byte counts are by stage.

        ``weight_bytes``: one version of the weights that a stage holds; ``static_bytes``: gradients, optimizer state,
        parameters that are not trained.
        """
        pipe, recorder = self._pipe, self._recorders[rank]
        return {"format": FORMAT, "rank": rank, "host": socket.gethostname(), "clock_offset_s": self._clocks[0][1],
                "placement": pipe.placement, "schedule": pipe.schedule, "flush": has_flush(pipe.schedule),
                "microbatches": pipe.microbatches, "update_every": pipe.update_every, "partition": pipe.partition,
                "recomputed": [sorted(layers) for layers in pipe.recomputed], "samples_per_step": self._samples,
                "weight_bytes": recorder.weight_bytes(), "static_bytes": recorder.static_bytes()}

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for rank in list(self._files):
            ended = [_clock(*clock) for clock in self._clocks[1:]]
            self._write(rank, *ended, *(['{"truncated": true}'] if self._recorders[rank].full else []))
        for file in self._files.values():
            file.close()


def _clock(at_s: float, offset_s: float) -> str:
    return f'{{"clock": [{at_s:.7f}, {offset_s:.9f}]}}'
