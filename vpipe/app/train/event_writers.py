"""Pass each line of ``metrics.jsonl`` on as numbers of the same names: to TensorBoard, and to Weights & Biases."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vpipe.app.errors import os_errors
from vpipe.errors import UserError

FOLDER = "tensorboard"


def check_installed(asked: bool, package: str, setting: str, remedy: str) -> None:
    """Refuse a run whose ``setting`` has asked for a package that is not installed; ``remedy`` does without it.

    Raises:
        UserError: the package is not installed.
    """
    if asked and find_spec(package) is None:
        raise UserError(f"{setting}, but the package '{package}' is not installed",
                        hint=f"pip install 'vpipe[{package}]', or {remedy}")


class TensorBoardWriter:
    """Write events, each at once: TensorBoard's own writer thread would compete with training.

    After an event that could not be written no more may be written, since no reader reads past a torn event.

    Args:
        run: the run folder.
        first: first step of this attempt; TensorBoard drops earlier events of this step and later ones.

    Raises:
        UserError: the events cannot be written there.
    """

    name = "TensorBoard"

    def __init__(self, run: Path, first: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        with os_errors(f"cannot write events into '{run / FOLDER}'",
                       "make it writable, or set metrics.tensorboard to false"):
            (run / FOLDER).mkdir(exist_ok=True)
            self._records = RecordWriter((run / FOLDER / name).open("wb"))
            self._write(file_version="brain.Event:2")
            if first:
                self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def line(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line of ``metrics.jsonl``; those of a checkpoint or the summary go under that name."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        self._write(step=int(line["step"]), summary=self._summary(value=values))

    def close(self, failed: bool = False) -> None:
        """Close the file; it does not hold whether the run failed."""
        with suppress(OSError):  # what could not be written before is tried again
            self._records.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._records.flush()


def scalars(line: Mapping[str, Any], group: str | None = None) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line of ``metrics.jsonl`` by name; ``checkpoint/`` or ``summary/`` before some."""
    if group is None:
        group = next((f"{key}/" for key in ("checkpoint", "summary") if key in line), "")
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from scalars(value, group)
        elif isinstance(value, (int, float)) and key != "step":
            yield group + key, value


RUN_ID = "wandb_id.txt"
"""File with the id of the run there, so that a resumed run continues it."""


class WandbWriter:
    """Log lines to a run of Weights & Biases; its own files are in ``wandb/`` of the run folder.

    Its x axis is ``step``: the package's own counter would refuse a line about an earlier step, such as that of a
    checkpoint whose writing has ended.

    Args:
        run: the run folder.
        mode: ``offline`` writes files, which ``wandb sync`` uploads; ``online`` uploads, unless WANDB_MODE says
            otherwise.
        config: of the run, one value per key.

    Raises:
        UserError: the package cannot begin a run.
    """

    name = "Weights & Biases"

    def __init__(self, run: Path, mode: str, config: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        known = run / RUN_ID
        try:
            before = known.read_text().strip() if known.exists() else None
            self._run = wandb.init(dir=str(run), name=run.name, config=dict(config), id=before, resume="allow",
                                   mode="offline" if mode == "offline" else None, settings={"console": "off"})
            known.write_text(f"{self._run.id}\n")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # of many classes, some of them the package's
            raise UserError(f"Weights & Biases cannot begin a run: {str(error) or type(error).__name__}",
                            hint="log in with: wandb login; or set metrics.wandb to offline, or to null") from None

    def line(self, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line of ``metrics.jsonl``; those of a checkpoint or the summary go under that name."""
        self._run.log({"step": int(line["step"]), **dict(scalars(line))})

    def close(self, failed: bool = False) -> None:
        """End the run there, as a failed one or not; online this waits until all is uploaded."""
        with suppress(Exception):
            self._run.finish(exit_code=int(failed))


EventWriter = TensorBoardWriter | WandbWriter
"""Passes lines on. After one that fails there are no more: a run outlives its charts."""


def event_writers(run: Path, first: int, config: Mapping[str, Any], *, tensorboard: bool,
                  wandb: str | None) -> list[EventWriter]:
    """Return the writers that a run asks for, with the arguments of their classes."""
    return [*([TensorBoardWriter(run, first)] if tensorboard else []),
            *([] if wandb is None else [WandbWriter(run, wandb, config)])]
