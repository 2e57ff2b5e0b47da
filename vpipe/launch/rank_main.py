"""What a rank's process runs: ``python -m vpipe.launch.rank_main FOLDER TASK``, started by a launcher.

The task is ``train``, with the folder of a checkpoint if it is to go on from one; ``verify N``: leave a trail of N
updates; ``compare``, with the arguments of :func:`vpipe.compare.run.run_comparison`; ``profile``, with sizes of
microbatches; or ``prepare``: look whether this host has what the config asks for, once for all its ranks, before any
starts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vpipe.distributed.environment import PARENT_PIPE
from vpipe.distributed.signals import Stopped, ask, end_as_decided, listen, stopped_status
from vpipe.distributed.watchdog import announce, report_to
from vpipe.errors import RunError, VpipeError
from vpipe.launch.failure_report import read_report, write_report
from vpipe.train.run_folder import CONFIG, FINGERPRINT, log_path

log = logging.getLogger("vpipe")


def main(folder: Path, task: str, *arguments: str) -> int:
    """Do the task as the folder's config says; a failure is written down for the launcher.

    Returns:
        The exit status; of the first rank, when a signal ended the training in good order, one that tells which
        (:func:`~vpipe.distributed.signals.status_after`).
    """
    listen()
    _follow_parent()
    rank = int(os.environ["RANK"])
    stopped: list[Stopped | None] = [None]

    def work() -> None:
        from vpipe.config.config import load_config
        from vpipe.train.job import Job
        from vpipe.train.loop import train
        from vpipe.verify.differences import record_rank

        config = load_config(folder / CONFIG)
        if config.launch.keep_memory:
            log.info(keep_memory())
        job = Job.from_config(config)
        if task == "verify":
            record_rank(job, folder, int(arguments[0]))
        elif task == "train":
            stopped[0] = train(job, folder, *map(Path, arguments))
        elif task == "compare":
            from vpipe.compare.run import run_comparison

            run_comparison(job, folder, arguments)
        elif task == "profile":
            from vpipe.train.planning import profile_rank

            profile_rank(job, folder, arguments)
        else:
            from vpipe.launch.checks import check_gpus

            check_gpus(job.config, map(int, arguments))
            (folder / FINGERPRINT).write_text(job.fingerprint())

    failure = do(folder, rank, work)
    if failure is not None:
        write_report(folder, rank, failure)
    end_as_decided()
    return failure.exit_status if failure is not None else stopped_status(rank, stopped[0])


def do(folder: Path, rank: int, work: Callable[[], None]) -> VpipeError | None:
    """Do a rank's work, with its log in ``folder``; returns why it failed."""
    logging.basicConfig(handlers=[RankLog(log_path(folder, rank))], level=logging.INFO,
                        format="%(asctime)s %(levelname)s %(message)s")

    def ended(error: RunError) -> None:
        log.error("rank %d is ended in the middle of its work: %s", rank, error)
        write_report(folder, rank, error)
        if PARENT_PIPE not in os.environ and speaks(folder, rank, int(os.environ["WORLD_SIZE"])):
            print(error, file=sys.stderr, flush=True)

    report_to(ended)
    try:
        work()
    except Exception as error:
        log.exception("rank %d failed", rank)
        announce(error)
        if isinstance(error, VpipeError):
            return error
        what = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        failure = RunError(what, rank=rank, hint="mend what raised it")
        failure.__cause__ = error
        return failure
    log.info("rank %d has ended", rank)
    return None


def speaks(folder: Path, rank: int, ranks: int) -> bool:
    """Whether of the reports in this folder a rank's own is the one to tell: no launcher reads them.

    One that blames itself comes first, then the earliest.
    """
    reports = [report for other in range(ranks) if (report := read_report(folder, other)) is not None]
    first = min(reports, key=lambda report: (report["blames_peer"], report["time"]), default=None)
    return first is None or bool(first["rank"] == rank)


def _follow_parent() -> None:
    """End at once when the launcher is gone, whatever this process is waiting for; leave off when it says so."""
    pipe = os.environ.get(PARENT_PIPE)
    if pipe is None:
        return

    def wait() -> None:
        while number := os.read(int(pipe), 1):  # of a signal; nothing when the other end is closed
            ask(number[0])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of ``malloc.h``."""

NEVER, MOST_BYTES = -1, 32 << 20
"""What is free at the end of the heap is never given back. Only blocks of more than this, the most that can be set, are
still mapped by themselves, and given back: to keep those, too (``M_MMAP_MAX`` 0), leaves holes in the heap, which the
next one does not fit once a smaller one was put there. It made a rank with logits of 64 MiB half as large again."""

TUNABLES = "GLIBC_TUNABLES"


def keep_memory(environment: Mapping[str, str] = os.environ) -> str:
    """Let this process keep what it frees, if its C library is glibc and nobody has tuned that.

    Args:
        environment: that the process was started with; ``MALLOC_*`` or glibc's tunables for malloc in it go before.

    Returns:
        What was done, for the log.
    """
    tuned = sorted(name for name in environment if name.startswith("MALLOC_"))
    if "glibc.malloc." in environment.get(TUNABLES, ""):
        tuned.append(TUNABLES)
    if tuned:
        return f"malloc is left as {', '.join(tuned)} in the environment says"
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return "the C library is not glibc: malloc is left as it is"
    library.mallopt(M_MMAP_THRESHOLD, MOST_BYTES)
    library.mallopt(M_TRIM_THRESHOLD, NEVER)
    return "malloc keeps what is freed"


class RankLog(logging.FileHandler):
    """A file that says once that it cannot be written, the disk being full; training goes on."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Called where a line could not be written, which is tried again with the next one."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with suppress(OSError):
                print(f"warning: cannot write '{self.baseFilename}': {error.strerror}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
