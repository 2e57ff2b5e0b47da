"""Note in a run on CPUs that its threads bring no gain there."""

from __future__ import annotations

from typing import Self

from vpipe.app.train.observers import Observer, Run

NO_GAIN = ("executor async_threaded: on a CPU it brings no gain over overlapped, which takes less memory; it is for "
           "GPUs, where each microbatch gets a stream")


class NoGain(Observer):
    """Write a line when the run begins, and follow nothing."""

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        if run.job.config.parallel.executor == "async_threaded" and run.pipe.device.type == "cpu":
            run.note(NO_GAIN)
        return None
