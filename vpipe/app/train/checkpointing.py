"""Save the checkpoints of a run from its loop, report on them, and load one."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from statistics import median
from time import perf_counter
from typing import NoReturn

from torch import Tensor

from vpipe import Pipeline, files
from vpipe.app.config.origin import KEPT, KEPT_BY_RUN, RUN
from vpipe.app.errors import LastingError
from vpipe.app.families.lora import base_names, is_adapter
from vpipe.app.run_log import best_checkpoint
from vpipe.app.train.job import Job, device_of
from vpipe.app.train.observers import Run
from vpipe.app.train.resume import lacks_adapters
from vpipe.app.train.run_folder import CONFIG, checkpoints_root
from vpipe.checkpoint import Checkpoint, Checkpoints, Manifest, Saver
from vpipe.distributed import RankEnvironment, exchange, watch
from vpipe.errors import RunError, UserError, counted

log = logging.getLogger("vpipe")

SETTLED = 0.05
"""Share of the minutes between two checkpoints for which updates are timed before their number is taken from that."""

NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
"""Errors of a save after which the next one would fail, too."""

LAST_SAVE_S = 5.0
"""Longest wait of a rank that fails by itself for a save that is being written."""


@dataclass
class Cadence:
    """Steps after which the pipeline drains for a checkpoint or an evaluation.

    Derived from the config alone, so a resumed run drains after the same steps; a run that has only minutes between
    two checkpoints measures the steps, and writes them into its config.
    """

    save: int | None  # steps between two checkpoints
    evaluate: int | None  # steps between two evaluations
    end: int | None  # the last step

    def __call__(self, steps: int) -> int | None:
        """Return how many steps are done when the pipeline next drains."""
        ends = [steps - steps % every + every for every in (self.save, self.evaluate) if every is not None]
        found = min(ends, default=None)
        return None if found is None or (self.end is not None and found >= self.end) else found

    @staticmethod
    def is_due(every: int | None, before: int, steps: int) -> bool:
        """Return whether a multiple of ``every`` steps was reached after ``before`` of them."""
        return every is not None and steps // every > before // every


class Checkpointing(AbstractContextManager["Checkpointing"]):
    """Save a run. Every rank makes one and calls the same methods after the same steps.

    If not all hosts see the run's folder, that is an error where the config has a section ``checkpoint``; without one,
    no checkpoints are made, and a note says so.

    Attributes:
        root: folder of the checkpoints; None when none are made.

    Raises:
        UserError: checkpoints cannot be written, or not all ranks see the folder.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._job, self._metrics = run, run.job, run.metrics
        self._reported = 0  # of the saver's results, in metrics.jsonl
        self._saved: int | None = run.job.steps_done or None  # steps of the latest
        self._saver: Saver | None = None  # opened by the first save
        self._reserve_due = False
        self._ask_at: int | None = None  # steps of this attempt
        self._answer: Callable[[], list[int]] = lambda: [0]
        self.root: Path | None = None
        job, config = run.job, run.job.config
        if not config.saving.makes_any:
            return
        root = Path(os.path.abspath(checkpoints_root(config, run.folder)))
        try:
            root = Path(exchange().from_rank(str(root)))
            Checkpoints(root).check_shared(exchange(), os.environ.get(RankEnvironment.HOST) or socket.gethostname())
        except UserError as error:
            if config.checkpoint is not None:
                raise
            run.note(f"no checkpoints are made: {error.problems[0].what} ({error.problems[0].hint})")
            return
        self.root = root
        self._config = config.resolved_yaml()  # not in a pause
        self._data = job.fingerprint() if run.pipe.rank == 0 else ""
        self._hashes = {name: files.sha256_of(run.folder / name) for name in KEPT if (run.folder / name).is_file()}
        self._reserve_due = config.saving.every_steps is not None and job.schedule.flush  # then nothing is in flight
        if config.saving.every_steps is None and config.saving.every_minutes is not None:
            self._ask_at = max(2, job.schedule.steps_begun)

    def agreed_steps(self) -> int | None:
        """Return how many steps ``checkpoint.every_minutes`` are, once, when all ranks know; called after every step.

        Rank 0 answers after n steps, 2n, 4n, ..., and every rank reads an answer when the next one is due. So no rank
        waits for one that waits for the rank's own microbatches in flight.
        """
        done = self._metrics.steps - self._job.steps_done
        if self._ask_at is None or done < self._ask_at:
            return None
        if not (steps := self._answer()[0]):
            self._ask_at = 2 * done
            self._answer = exchange("minutes").begin(self._measured_steps(done) if self._run.pipe.rank == 0 else 0)
            return None
        self._ask_at, self._reserve_due = None, self._job.schedule.flush
        self._config = self._job.config.saving_every(steps).resolved_yaml()
        self._run.note(f"a checkpoint every {counted(steps, self._job.step_name)}, which take about "
                       f"{self._job.config.saving.every_minutes:g} minutes: checkpoint.every_steps of the run")
        return steps

    def _measured_steps(self, done: int) -> int:
        """Return how many steps the minutes between two checkpoints are, and write them into the run's config; 0 while
        too few of ``done`` steps were timed, or the disk is full.

        The first multiple of these steps comes after the answer is read: a run that has the number from its beginning
        drains after the same steps.
        """
        before, timed = self._job.steps_done, self._metrics.update_s[1:]
        wanted_s = 60 * (self._job.config.saving.every_minutes or 0)
        if sum(timed) < SETTLED * wanted_s:
            return 0
        steps = max(1, round(wanted_s / median(timed[len(timed) // 2:])))
        while steps * (before // steps + 1) < before + 2 * done + self._job.schedule.steps_begun:
            steps += 1
        with suppress(OSError):  # metrics.jsonl has a warning then
            files.replace_text(self._run.folder / CONFIG, self._job.config.saving_every(steps).resolved_yaml())
            return steps
        return 0

    def _open_saver(self, root: Path) -> Saver:
        if self._saver is None:
            saving = self._job.config.saving
            self._saver = Saver(root, saving.keep, exchange("checkpoints"), self._metrics.sync)
            if saving.keep_best:
                self._saver.spare = self._best
        return self._saver

    def save(self) -> None:
        """Save the state after the last step; the pipeline is empty, or drains. Training then goes on."""
        steps = self._metrics.steps
        if self.root is None or self._saved == steps:
            return
        began = perf_counter()
        with watch.activity.during("saving a checkpoint"):
            tensors = self._run.pipe.local_state()
            (saver := self._open_saver(self.root)).wait()
            self.report()  # before another one fails
            saver.save(self._about(), tensors, began)
        self._saved = steps
        self.report()

    def _best(self, found: Iterable[Path]) -> Path | None:
        return best_checkpoint(self._metrics.evaluations, found)

    def report(self) -> None:
        """Report the results of earlier saves; called between two steps."""
        if self._reserve_due and self.root is not None and self._metrics.steps > self._job.steps_done:
            self._reserve_due = False  # now that the optimizer has its state
            pipe = self._run.pipe
            self._open_saver(self.root).reserve((tensor.nbytes for tensor in pipe.local_state().values()),
                                                pinned=pipe.device.type != "cpu")
        self._report(wait_for_drains=True)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete or given up."""
        if self._saver is not None:
            with watch.activity.during("waiting for the last checkpoint"):
                self._saver.wait()
            self._report(wait_for_drains=False)

    def _report(self, wait_for_drains: bool) -> None:
        for saved in [] if self._saver is None else self._saver.results[self._reported:]:
            full = any(map((saved.error or "").count, NO_ROOM))
            drained = self._job.schedule.flush or full or self._metrics.steps >= saved.step + self._job.cut.count
            if wait_for_drains and not (drained and self._metrics.steps > saved.step):
                break
            if wait_for_drains and full:
                self._refuse(saved.step, saved.error or "", LastingError)
            facts: dict[str, float | str] = {"error": saved.error} if saved.error else {
                "pause_s": round(saved.pause_s, 4), "save_s": round(saved.seconds, 4), "bytes": saved.bytes,
                "drain_s": round(self._drain_s(saved.step, saved.pause_s), 4)}
            self._metrics.checkpoint(saved.step - 1, f"step-{saved.step}", **facts)
            log.info("checkpoint of step %d: %s", saved.step, facts)
            self._reported += 1
        for warning in [] if self._saver is None else self._saver.warnings():
            self._run.note(f"warning: {warning}")

    @property
    def is_saved(self) -> bool:
        """Return whether the state after the last step is in a checkpoint; valid after :meth:`finish`."""
        return self._saved == self._metrics.steps and self._lost is None

    def check_end(self) -> None:
        """Refuse to end well where the result of the run is lost.

        Raises:
            RunError: the last checkpoint was given up.
        """
        if self._lost is not None and self._saved == self._metrics.steps:
            self._refuse(self._saved, self._lost, RunError)

    def _refuse(self, step: int, error: str, kind: type[RunError]) -> NoReturn:
        """End the run, since a save was given up."""
        assert self.root is not None, "it was tried there"
        newest = Checkpoints(self.root).newest()
        hint = (f"make room on the disk of '{self.root}' (df -h shows what is free), or lower checkpoint.keep, or set "
                "checkpoint.directory to a folder on another disk" if any(map(error.count, NO_ROOM)) else
                "set checkpoint.directory, or lower the learning rate where weights are not finite")
        rest = "there is no checkpoint to resume from" if newest is None else (
            f"then go on from step {Checkpoints.step_of(newest)} with: vpipe train --resume "
            f"{quote(str(self._run.folder))}")
        raise kind(f"the checkpoint of step {step} could not be saved: {error}", hint=f"{hint}; {rest}")

    def summary(self) -> list[str]:
        """Return the number, size, place and cost of the saves, in lines."""
        complete = [] if self._saver is None else [saved for saved in self._saver.results if not saved.error]
        if not complete:
            return []
        assert self.root is not None, "the saves are there"
        there = Checkpoints(self.root).all()
        kept, best = len(there), self._best(there)
        lines = [f"{counted(len(complete), 'checkpoint')} of {complete[-1].bytes / 1e6:,.1f} MB"
                 + (f", {kept} kept" if kept < len(complete) else "")
                 + (f", the best of step {Checkpoints.step_of(best)}" if best is not None and best != there[-1] else "")
                 + f", the last of step {complete[-1].step} in "
                 f"{self.root if self._run.folder.is_absolute() else os.path.relpath(self.root)}",
                 f"for each training paused {1e3 * median(s.pause_s for s in complete):.0f} ms, and it was complete "
                 f"after {median(s.seconds for s in complete):.2f} s (medians)"]
        drains = [self._drain_s(saved.step, saved.pause_s) for saved in complete if self._metrics.steps > saved.step]
        if drains and not self._job.schedule.flush:
            lines.append(f"running empty and filling again cost {median(drains):.2f} s for each (median)")
        return lines

    @property
    def _lost(self) -> str | None:
        """The reason why the last save was given up; None where it was not, and before the first."""
        return self._saver.results[-1].error if self._saver is not None and self._saver.results else None

    def _about(self) -> Manifest:
        job, pipe = self._job, self._run.pipe
        position = pipe.position
        arrangement = {**pipe.arrangement, "drained": not job.schedule.flush, RUN: os.path.abspath(self._run.folder),
                       KEPT_BY_RUN: self._hashes}
        return Manifest(position.steps, position.samples, job.config.training.seed, self._data, self._config,
                        arrangement, position.as_numbers(pipe.microbatches))

    def _drain_s(self, step: int, pause_s: float) -> float:
        """Return by how much the steps around a save, as many before and after as there are stages, took longer."""
        if self._job.schedule.flush or self._metrics.steps <= step:
            return 0.0
        at, steps = step - self._job.steps_done, self._job.cut.count
        around = self._metrics.update_s[max(0, at - steps):at + steps]
        return max(0.0, sum(around) - pause_s - len(around) * median(self._metrics.update_s))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._saver is None:
            return
        if error is None:
            self._saver.close()
        elif isinstance(error, Exception) and getattr(error, "peer", None) is None:
            with watch.activity.during("waiting for the last checkpoint"):
                self._saver.close(min(LAST_SAVE_S, self._job.config.parallel.timeout_s / 2))


def restore(pipe: Pipeline, job: Job, checkpoint: Path, manifest: Manifest) -> str | None:
    """Load a checkpoint, whose files were hashed before any rank started, into a new pipeline. All ranks call it.

    Returns:
        The line of :meth:`vpipe.Pipeline.restore`.

    Raises:
        UserError: it does not fit, or a file cannot be read.
    """
    with watch.activity.during("reading a checkpoint"):
        found = Checkpoint(checkpoint, manifest)
        return pipe.restore(manifest.position(pipe.microbatches), lambda wants: (
            _with_new_adapters(pipe, job, found) if lacks_adapters(manifest, job) else
            found.tensors(filter(wants, manifest.tensors), device_of(job.config), checked=True)))


def _with_new_adapters(pipe: Pipeline, job: Job, found: Checkpoint) -> dict[str, Tensor]:
    """Return the weights of the stages here, of which a checkpoint has only those that are frozen."""
    state = {f"{layer.name}.{name}": tensor if is_adapter(name) else None
             for stage in pipe.stages for number in stage.layers for layer in [job.model.layers[number]]
             for name, tensor in layer.materialize(number, job.config.training.seed).state_dict().items()
             if name not in layer.ties}
    frozen = base_names(state)
    read = found.weights(dict.fromkeys(frozen.values()), checked=True)
    return {f"model.{name}": read[frozen[name]] if tensor is None else tensor for name, tensor in state.items()}
