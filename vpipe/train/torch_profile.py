"""``RUN/profiler_<name>/rank<N>/``: one step of training as torch's profiler sees it, for TensorBoard and Perfetto."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile, record_function

from vpipe.config.config import Config
from vpipe.distributed.watchdog import at_work
from vpipe.errors import UserError
from vpipe.pipeline import Pipeline
from vpipe.progress import message_if_slow
from vpipe.runtime.trace import label_actions
from vpipe.schedules.prepare import is_file
from vpipe.train.job import Job

log = logging.getLogger("vpipe")

OVERLAPPED = "overlapped"
"""The executor whose profiles are named after the schedule."""

LOG_LEVEL = "KINETO_LOG_LEVEL"
SILENT = "99"


class TorchProfile:
    """Records a step on this rank: from when it has ended the step before to when it has ended this one.

    So without a flush, when ranks are at different microbatches, each has as much work in it as a step has; with a
    schedule read from a file, all of whose steps end at once, it is the batch with the step in it.
    Every action has its name in it, the step the one that TensorBoard looks for.

    Args:
        folder: of the run.
        note: shows a line.

    Attributes:
        made: whether the step was recorded by this attempt of the run. It says so after the same step on every rank.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, job: Job, pipe: Pipeline, folder: Path, note: Callable[[str], None]) -> None:
        training = job.config.training
        self.made = False
        self._pipe, self._note, self._word, self._exit = pipe, note, job.step_name, training.exit_after_profile
        wanted = training.profile_iteration
        self._step = wanted if wanted is not None and wanted > job.steps_done else None
        if self._step is None:
            return
        # What a file of a schedule says of several steps is done before the first of them is told.
        at_once = 1 if job.schedule.stream else job.schedule.microbatches // job.schedule.rounds.per_step
        self._gpu = pipe.engine.local_stages[0].device.type == "cuda"
        self._begins = (self._step - 1) // at_once * at_once
        self._recording: tuple[profile, ExitStack] | None = None
        self._root = folder / f"profiler_{profile_name(job.config, pipe.schedule)}"
        self._file = self._root / f"rank{pipe.rank}" / f"rank{pipe.rank}.{self._step}.pt.trace.json"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write the profile '{self._file}': {error.strerror}",
                            hint="make room there, or leave training.profile_iteration out") from None
        os.environ.setdefault(LOG_LEVEL, SILENT)  # torch's profiler tells each terminal that it starts
        with self._recorder():
            pass  # on a GPU the first time takes seconds, which would be the step's

    def before(self, steps: int) -> None:
        """Between two steps, nothing else is to come before the next one.

        Args:
            steps: that are done.
        """
        if self._step is None or self._recording is not None or self.made or steps != self._begins:
            return
        recorder, stack = self._recorder(), ExitStack()
        if self._gpu:
            torch.cuda.synchronize()  # what is left of the steps before is none of this one's
        for worker in self._pipe.engine.workers.values():
            stack.callback(label_actions(worker))
        stack.enter_context(recorder)
        stack.enter_context(record_function(f"ProfilerStep#{self._step}"))
        self._recording = recorder, stack

    def after(self, steps: int) -> bool:
        """A step has ended, or several; whether that took time which is none of the training's."""
        if self._step is None or self._recording is None or steps < self._step:
            return False
        recorder = self._end()
        self.made = True
        with at_work("writing a profile"), message_if_slow("writing the profile", self._pipe.rank == 0):
            self._export(recorder)
        self._note(f"{self._word} {self._step} is profiled: TensorBoard and Perfetto open {self._root}, a folder per "
                   "rank" + ("; the run ends here (training.exit_after_profile)" if self._exit else ""))
        return True

    @property
    def ends_run(self) -> bool:
        """Whether the run is to end now."""
        return self.made and self._exit

    def _recorder(self) -> profile:
        """What is beneath torch.profiler.profile, which imports the compiler of torch: that takes a second or two."""
        return profile(use_kineto=True, use_device="cuda" if self._gpu else None,
                       experimental_config=_ExperimentalConfig(profile_all_threads=True))  # executors may have several

    def _end(self) -> profile:
        assert self._recording is not None, "there is one"
        (recorder, stack), self._recording = self._recording, None
        stack.close()
        return recorder

    def _export(self, recorder: profile) -> None:
        """At once or not at all: what reads it may be looking. A full disk costs the profile alone."""
        partial = self._file.with_name(f"{self._file.name}.tmp")
        write: Callable[[str], object] = recorder.export_chrome_trace
        try:
            write(str(partial))
            partial.replace(self._file)
        except (OSError, RuntimeError) as error:  # torch's own has no other word for it
            self._note(f"warning: the profile '{self._file}' could not be written: {error}; training goes on")

    def __enter__(self) -> TorchProfile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._step is None:
            return
        if self._recording is not None:
            self._end()
        if not self.made:
            with suppress(OSError):
                self._file.parent.rmdir()
                self._file.parents[1].rmdir()
            if error is None:
                self._note(f"no profile was made: the run ended before {self._word} {self._step} did")


def profile_name(config: Config, schedule: str) -> str:
    """What a profile is called after: the executor, or where that is the usual one the schedule."""
    executor = config.parallel.executor
    named = executor if executor != OVERLAPPED else Path(schedule).stem if is_file(schedule) else schedule
    return re.sub(r"[^\w.-]+", "_", named)
