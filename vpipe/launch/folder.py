"""The folder of a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vpipe.errors import UserError

if TYPE_CHECKING:
    from vpipe.train.config import Config

CONFIG = "config.yaml"

PLAN = "plan.json"
"""The plan that a run follows."""

PROFILE = "profile.json"
"""The profile that it was made from."""

METRICS = "metrics.jsonl"
"""A line per step."""

EARLIER = "earlier"
"""What earlier attempts left: ``earlier/1`` is that of the first."""

RUNNING = "running"
"""Held while a run is going; says which process holds it."""

FINGERPRINT = "fingerprint"
"""Where a rank that looked at its host's data says which they are."""


def make_run_folder(log_directory: Path, resolved_config: str) -> Path:
    """``<log_directory>/<timestamp>/`` with the resolved config in it.

    Raises:
        UserError: the folder cannot be made or written.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        for attempt in count():
            folder = log_directory / (stamp if attempt == 0 else f"{stamp}.{attempt}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if log_directory.is_dir():
                    continue  # two runs in one second
                raise
            (folder / CONFIG).write_text(resolved_config)
            return folder
    except OSError as error:
        raise UserError(f"cannot make the run's folder in '{log_directory}': {error.strerror}",
                        hint="set log_directory to a folder that can be written") from None
    raise AssertionError("count() does not end")


def checkpoints_root(config: Config, folder: Path) -> Path:
    """Where the checkpoints of a run go: in its folder, or in one of its own in ``checkpoint.directory``."""
    directory = config.saving.directory
    return folder / "checkpoints" if directory is None else directory / folder.name


def begin_attempt(folder: Path, config: str, lines: Iterable[str]) -> Path:
    """Make a run's folder ready to go on: what the attempt before left moves to ``earlier/<n>/``, which is returned.

    The logs stay, and go on. A process that is killed meanwhile leaves a folder that can be made ready again.

    Args:
        config: the resolved config of the new attempt.
        lines: of ``metrics.jsonl`` that stay.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        before = [int(found.name) for found in (folder / EARLIER).glob("*") if found.name.isdecimal()]
        earlier = folder / EARLIER / str(max(before, default=0) + 1)
        earlier.mkdir(parents=True)
        for name in (CONFIG, METRICS, PLAN, PROFILE):
            if (folder / name).exists():
                shutil.copyfile(folder / name, earlier / name)
        for path in [*sorted(folder.glob("rank*.failure.json")), folder / "trace"]:
            if path.exists():
                path.rename(earlier / path.name)
        _replace(folder / METRICS, "".join(f"{line}\n" for line in lines))
        _replace(folder / CONFIG, config)
    except OSError as error:
        raise UserError(f"cannot go on in the run's folder '{folder}': {error.strerror}",
                        hint="make it writable, or make room") from None
    return earlier


def _replace(path: Path, text: str) -> None:
    """Write a file that is never there in half."""
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Hold a run, so that no other process goes on with it meanwhile; the system lets go when this process ends.

    Raises:
        UserError: another process holds it.
    """
    file = _held(folder)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
    finally:
        with suppress(OSError):
            (folder / RUNNING).unlink()
        file.close()


def check_not_running(folder: Path) -> None:
    """Refuse a run that is still going.

    Raises:
        UserError: it is; the text says which process.
    """
    if (folder / RUNNING).exists():
        _held(folder).close()


def _held(folder: Path) -> IO[str]:
    path = folder / RUNNING
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "a process that has just begun"
            file.close()
            raise UserError(f"the run in '{folder}' is still going ({holder})",
                            hint="wait until it has ended, or end it first") from None
        except OSError:
            return file  # a file system that knows no locks
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()  # whoever held it has just removed it


def log_path(folder: Path, rank: int) -> Path:
    """The log of a rank."""
    return folder / f"rank{rank}.log"


def failure_path(folder: Path, rank: int) -> Path:
    """Where a rank that fails says why, for its launcher."""
    return folder / f"rank{rank}.failure.json"
