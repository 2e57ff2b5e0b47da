"""Record a step with torch's profiler into ``RUN/profiler_<name>/rank<N>/``, for TensorBoard and Perfetto."""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile, record_function

from vpipe import accelerator
from vpipe.app.config.config import Config
from vpipe.app.errors import os_errors
from vpipe.app.progress import message_if_slow
from vpipe.app.train.observers import Observer, Run
from vpipe.distributed import watch
from vpipe.schedules import CsvFile

log = logging.getLogger("vpipe")


class TorchProfiler(Observer):
    """Record step ``training.profile_iteration`` on this rank, with the names of its actions.

    Without a flush, ranks are at different microbatches, but each records the work of one step. With a schedule from a
    file, all steps of a batch end at once, so the batch is recorded.

    Attributes:
        made: whether the step was recorded in this attempt.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, run: Run) -> None:
        self._run, job, pipe, training = run, run.job, run.pipe, run.job.config.training
        self._exit = training.exit_after_profile
        assert training.profile_iteration is not None, "a run without a profiled step makes no TorchProfiler"
        self._step, self.made = training.profile_iteration, False
        # All steps of a schedule from a file are done before the first of them is reported.
        at_once = 1 if job.schedule.stream else job.schedule.microbatches // job.schedule.assignment.per_step
        self._gpu = pipe.device.type != "cpu"
        self._begins = (self._step - 1) // at_once * at_once
        self._recording: tuple[profile, ExitStack] | None = None
        self._root = run.folder / f"profiler_{profile_name(job.config, pipe.schedule)}"
        self._file = self._root / f"rank{pipe.rank}" / f"rank{pipe.rank}.{self._step}.pt.trace.json"
        with os_errors(f"cannot write the profile '{self._file}'",
                       "make room there, or leave training.profile_iteration out"):
            self._file.parent.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints a line as it starts
        with self._recorder():
            pass  # on a GPU the first start takes seconds, which the step would seem to take

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        profiled = run.job.config.training.profile_iteration
        return None if profiled is None or profiled <= run.job.steps_done else cls(run)

    def before_step(self, done: int) -> None:
        """Begin to record if the next step is due."""
        if self._recording is not None or self.made or done != self._begins:
            return
        recorder, stack = self._recorder(), ExitStack()
        if self._gpu:
            accelerator.synchronize(self._run.pipe.device)  # work of earlier steps does not belong to this one
        stack.enter_context(self._run.pipe.labelled())
        stack.enter_context(recorder)
        stack.enter_context(record_function(f"ProfilerStep#{self._step}"))
        self._recording = recorder, stack

    def step(self, done: int) -> None:
        """End the record if its step has ended, and write it, which is no time of training.

        The file is written completely or not at all, since a reader may be open. A full disk costs only the profile.
        """
        if self._recording is None or done < self._step:
            return
        self.made = True
        with watch.activity.during("writing a profile"), message_if_slow(
                "writing the profile", self._run.pipe.rank == 0):
            recorder, partial = self._end(), self._file.with_name(f"{self._file.name}.tmp")
            try:
                recorder.export_chrome_trace(str(partial))  # type: ignore[no-untyped-call]
                partial.replace(self._file)
            except (OSError, RuntimeError) as error:  # torch raises RuntimeError
                self._run.note(f"warning: the profile '{self._file}' could not be written: {error}; training continues")
        self._run.note(f"{self._run.job.step_name} {self._step} is profiled: TensorBoard and Perfetto open "
                       f"{self._root}, a folder per rank"
                       + ("; the run ends here (training.exit_after_profile)" if self._exit else ""))
        self._run.metrics.exclude_time()

    @property
    def ends_run(self) -> bool:
        """Return whether the run must end now."""
        return self.made and self._exit

    def _recorder(self) -> profile:
        """Return the base of torch.profiler.profile, which itself takes seconds to import torch's compiler."""
        return profile(use_kineto=True, use_device=self._run.pipe.device.type if self._gpu else None,
                       experimental_config=_ExperimentalConfig(profile_all_threads=True))  # executors may have several

    def _end(self) -> profile:
        assert self._recording is not None, "a record was begun"
        (recorder, stack), self._recording = self._recording, None
        stack.close()
        return recorder

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._recording is not None:
            self._end()
        if not self.made:
            with suppress(OSError):
                self._file.parent.rmdir()
                self._file.parents[1].rmdir()
            if error is None:
                self._run.note(f"no profile was made: the run ended before {self._run.job.step_name} {self._step} did")


def profile_name(config: Config, schedule: str) -> str:
    """Return the name of a profile: the executor, or with the default executor the schedule."""
    executor = config.parallel.executor
    named = executor if executor != "overlapped" else Path(schedule).stem if CsvFile.is_path(schedule) else schedule
    return re.sub(r"[^\w.-]+", "_", named)
