"""The watch of this process: as of the process group, there is one or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from vpipe.errors import RunError
from vpipe.watch.watch import Watch

_watch: Watch | None = None


def _print(error: RunError) -> None:
    print(error, file=sys.stderr, flush=True)


_report: Callable[[RunError], None] = _print


def watch_of_process() -> Watch | None:
    """None for a pipeline in one process, and where the user made the process group."""
    return _watch


def install(watch: Watch) -> None:
    """From now on it is this process's."""
    global _watch
    _watch = watch


def report_to(report: Callable[[RunError], None]) -> None:
    """Let a launcher's worker write down why this process is ended in the middle of its work; else stderr says so."""
    global _report
    _report = report


def end_process(error: RunError) -> None:
    """End this process from any thread, whatever its main thread is in."""
    with suppress(Exception):
        _report(error)
    os._exit(error.exit_status)


def announce(error: BaseException) -> None:
    """Let all ranks know of an error of this one, if there are others."""
    if _watch is not None:
        _watch.failed(error)
