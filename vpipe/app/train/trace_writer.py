"""Write the timeline of each rank to ``trace/rank<N>.jsonl`` in the run folder; ``vpipe trace`` reads it."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import IO, Self

from vpipe import Pipeline
from vpipe.app.errors import os_errors
from vpipe.app.train.observers import Observer, Run
from vpipe.schedules import RecordedAction

log = logging.getLogger("vpipe")

AT_ONCE, AFTER_S = 4096, 5.0
"""Records that are written between two steps (in 10 ms), and seconds after which fewer are written."""


class TraceWriter(Observer):
    """Record a pipeline: one file for each of its ranks in this process, those of later lanes in ``trace/lane<N>``.

    :mod:`vpipe.schedules.trace` describes the lines. Files are written between steps and at the end, also of a
    run that fails, in whole lines. A rank that is killed loses the last seconds.

    Args:
        folder: of the run.
        pipe: not trained yet. All ranks make a writer together.
        samples_per_step: for the reader; it may be set until something is written.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, pipe: Pipeline, samples_per_step: int) -> None:
        self._pipe, self.samples_per_step = pipe, samples_per_step
        self._recorders = pipe.record()
        self._files: dict[int, IO[str]] = {}
        self._full: set[int] = set()
        own = folder / "trace" / (f"lane{pipe.lane}" if pipe.lane else "")
        with os_errors(f"cannot write the timeline of the run in '{own}'", "make room there, or set trace to false"):
            own.mkdir(parents=True, exist_ok=True)
            self._files = {rank: (own / f"rank{rank}.jsonl").open("w", encoding="utf-8") for rank in self._recorders}
        self._clocks = [self._compare_clocks()]
        self._wrote_s = dict.fromkeys(self._files, float("-inf"))

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        return cls(run.folder, run.pipe, run.job.step_size[0]) if run.job.config.trace else None

    def step(self, done: int) -> None:
        """Write the waiting records, if they are many or old; called between two steps."""
        for rank in list(self._files):
            recorder = self._recorders[rank]
            if recorder.waiting >= AT_ONCE or (recorder.waiting and perf_counter() - self._wrote_s[rank] > AFTER_S):
                self._write(rank)
            if recorder.full and rank not in self._full:
                self._full.add(rank)
                log.info("the timeline of rank %d ends here: it holds %s actions, the most that are recorded", rank,
                         f"{recorder.count:,}")

    def end(self) -> None:
        """Compare the clocks once more at a regular end; all ranks call this."""
        self._clocks.append(self._compare_clocks())

    def _compare_clocks(self) -> tuple[float, float]:
        """Return the time on this rank's clock, and the offset to rank 0's."""
        offset_s = self._pipe.clock_offset()
        return perf_counter(), offset_s

    def _write(self, rank: int, *closing: str) -> None:
        """Write in one piece, so that a killed rank leaves whole lines. A full disk ends the record, not the run."""
        file, recorder = self._files[rank], self._recorders[rank]
        try:
            lines = [] if file.tell() else [json.dumps(self._header(rank)), _clock(*self._clocks[0])]
            records = [record.to_json() for record in recorder.pop_records()]
            file.write("".join(f"{line}\n" for line in [*lines, *records, *closing]))
            file.flush()
        except OSError as error:
            recorder.stop()
            del self._files[rank]
            with suppress(OSError):  # what could not be written before is tried again
                file.close()
            log.warning("the timeline of rank %d breaks off, training continues: cannot write %s: %s", rank, file.name,
                        error.strerror)
        self._wrote_s[rank] = perf_counter()

    def _header(self, rank: int) -> dict[str, object]:
        """Return the description of the run and of a rank; bytes are per stage.

        ``weight_bytes``: one version of the weights of a stage; ``static_bytes``: gradients, optimizer state, and
        parameters that are not trained.
        """
        pipe, recorder = self._pipe, self._recorders[rank]
        return {"format": RecordedAction.file_format(), "rank": rank, "host": socket.gethostname(),
                "clock_offset_s": self._clocks[0][1], "placement": pipe.placement, "schedule": pipe.schedule,
                "flush": pipe.lowered.flush,
                "microbatches": pipe.microbatches, "update_every": pipe.update_every, "partition": pipe.partition,
                "recomputed": [sorted(layers) for layers in pipe.recomputed], "samples_per_step": self.samples_per_step,
                "weight_bytes": recorder.weight_bytes(), "static_bytes": recorder.static_bytes(),
                **({} if pipe.lowered.slices == 1 else {"slices": pipe.lowered.slices}),
                **({} if pipe.lanes == 1 else {"lane": pipe.lane, "lanes": pipe.lanes})}

    def __exit__(self, *failure: object) -> None:
        for rank in list(self._files):
            clocks = [_clock(*clock) for clock in self._clocks[1:]]
            self._write(rank, *clocks, *(['{"truncated": true}'] if self._recorders[rank].full else []))
        for file in self._files.values():
            file.close()


def _clock(at_s: float, offset_s: float) -> str:
    return f'{{"clock": [{at_s:.7f}, {offset_s:.9f}]}}'
