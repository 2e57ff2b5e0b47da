"""Make the folder of a run, lock it, and make it ready for another attempt."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vpipe import files
from vpipe.app.config.origin import KEPT, ORIGIN
from vpipe.app.errors import os_errors
from vpipe.app.run_log import METRICS, RunLog
from vpipe.errors import UserError, counted

if TYPE_CHECKING:  # commands that list checkpoints need no pydantic
    from vpipe.app.config.config import Config

RUNS = Path("output")  # the default of log_directory
CONFIG = "config.yaml"
PLAN = "plan.json"  # that the run follows
PROFILE = "profile.json"  # that the plan was made from
SUMMARY = "summary.csv"  # the config and the figures of a run that has ended, on one row
FACTS = "run.json"  # its length, the ranks and layers of its stages, and what these were planned to take
RANK_TIMES = "rank_times.jsonl"  # the times of every rank, a line per report
EARLIER = "earlier"  # the files of earlier attempts: earlier/1 has those of the first
RUNNING = "running"  # locked while a run is going; names the process
LAUNCHED = "launched"  # the same for the process that started the run, from before its ranks start until it ends


def make_run_folder(log_directory: Path, resolved_config: str, checkpoints: Path | None = None) -> Path:
    """Make ``<log_directory>/<timestamp>/`` with the resolved config in it.

    Args:
        checkpoints: ``checkpoint.directory``; a folder of the same name is made there. Runs of other log directories
            may share it and begin in the same second.

    Raises:
        UserError: a folder cannot be made or written.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with os_errors(f"cannot make the run's folder in '{log_directory}'",
                   "set log_directory to a folder that can be written"):
        for attempt in count():
            folder = log_directory / (stamp if attempt == 0 else f"{stamp}.{attempt}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if log_directory.is_dir():
                    continue  # two runs in one second
                raise
            if checkpoints is not None and not _make_checkpoints(checkpoints / folder.name, folder):
                continue
            (folder / CONFIG).write_text(resolved_config)
            return folder
    raise AssertionError("count() does not end")


def _make_checkpoints(checkpoints: Path, run: Path) -> bool:
    """Make the folder of a run's checkpoints; if it exists, remove the run's own, which is empty, and return False."""
    try:
        checkpoints.mkdir(parents=True)
    except OSError as error:
        run.rmdir()
        if isinstance(error, FileExistsError) and checkpoints.is_dir():
            return False
        raise UserError(f"cannot make the folder of the run's checkpoints '{checkpoints}': {error.strerror}",
                        hint="set checkpoint.directory to a folder that can be written") from None
    return True


def run_in(folder: Path | None) -> Path:
    """Return ``folder``; where none is named, or a folder of runs, the run there that wrote last, and say which.

    Raises:
        UserError: none is named, and there is none in ``output``.
    """
    root = RUNS if folder is None else folder
    written = {path.parent: path.stat().st_mtime for name in ("rank0.log", METRICS) for path in root.glob(f"*/{name}")}
    if folder is not None and (not written or any((folder / name).exists() for name in (CONFIG, METRICS))):
        return folder
    if not written:
        raise UserError(f"no run is named, and there is none in '{RUNS}'",
                        hint="name the folder that 'vpipe train' prints as its run folder")
    newest = max(written, key=written.__getitem__)
    print(f"the newest run: {newest}", file=sys.stderr, flush=True)
    return newest


def checkpoints_root(config: Config, folder: Path) -> Path:
    """Return the folder of a run's checkpoints: in the run's, or one of its own in ``checkpoint.directory``."""
    directory = config.saving.directory
    return folder / "checkpoints" if directory is None else directory / folder.name


def begin_attempt(folder: Path, attempt: str, config: str, lines: Iterable[str]) -> None:
    """Prepare a run's folder for another attempt: files of the one before move to ``earlier/<attempt>/``.

    The logs stay and are continued. If the process is killed meanwhile, the folder can be prepared again, unless a
    checkpoint has more steps than ``lines``.

    Args:
        attempt: a name that is not in ``earlier`` yet.
        config: the resolved config of the new attempt.
        lines: of ``metrics.jsonl`` that stay.

    Raises:
        UserError: the folder cannot be written.
    """
    with os_errors(f"cannot write into the run's folder '{folder}'", "make it writable, or make room"):
        earlier = folder / EARLIER / attempt
        earlier.mkdir(parents=True)
        for name in (CONFIG, METRICS, PLAN, PROFILE, ORIGIN, *KEPT):
            if (folder / name).exists():
                shutil.copyfile(folder / name, earlier / name)
        for path in [*sorted(folder.glob("rank*.failure.json")), folder / SUMMARY, folder / RANK_TIMES,
                     folder / "trace"]:
            if path.exists():
                path.rename(earlier / path.name)
        files.replace_text(folder / METRICS, "".join(f"{line}\n" for line in lines))
        files.replace_text(folder / CONFIG, config)


@contextmanager
def running(folder: Path, name: str = RUNNING) -> Iterator[None]:
    """Lock a run while it trains, by a file of this ``name``; the system unlocks it when this process ends.

    Raises:
        UserError: another process has locked it.
    """
    file = _lock(folder, name)
    try:
        with suppress(OSError):  # of a full disk: it is locked all the same
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        with suppress(OSError):
            (folder / name).unlink()
        file.close()


def check_not_running(folder: Path) -> None:
    """Refuse a run that is still going.

    Raises:
        UserError: it is; the text says which process.
    """
    if (folder / RUNNING).exists():
        _lock(folder, RUNNING).close()


_locked, _locks = set[Path](), ExitStack()
"""The runs that this process has locked by :func:`lock_run`."""


@atexit.register
def unlock_runs() -> None:
    """Unlock all runs that this process has locked by :func:`lock_run`."""
    _locked.clear()
    _locks.close()


def lock_run(folder: Path) -> None:
    """Lock a run before its ranks start, so that only one of two processes resumes it.

    A process may lock it twice; :func:`unlock_runs` or the end of the process unlocks it.

    Raises:
        UserError: another process has locked it, or the run is still going.
    """
    if folder not in _locked:
        with os_errors(f"cannot write into the run's folder '{folder}'", "make it writable, or make room"):
            _locks.enter_context(running(folder, LAUNCHED))
        _locked.add(folder)
    check_not_running(folder)


def _lock(folder: Path, name: str) -> IO[str]:
    """Lock a file of a run; closing it unlocks it."""
    path = folder / name
    while True:
        file = path.open("a+", errors="replace")
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
    """Return the log of a rank."""
    return folder / f"rank{rank}.log"


def failure_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank that fails writes why, for its launcher."""
    return folder / f"rank{rank}.failure.json"


def why_unsaved(config: Config, folder: Path) -> str:
    """Return ``its first is due after step 20, and it made 12 steps``.

    Args:
        config: of the run in ``folder``.
    """
    saving, last = config.saving, RunLog(folder).last_step()
    every, minutes = saving.every_steps, saving.every_minutes
    done = 0 if last is None else last + 1
    if not done:
        return "it made no step"
    if every is None:
        return "checkpoint.every_minutes is null" if minutes is None else (
            f"its first is due after {minutes:g} minutes, and it made {counted(done, 'step')}")
    if done < every:
        return f"its first is due after step {every}, and it made {counted(done, 'step')}"
    return f"no save came to its end, see {log_path(folder, 0)}"
