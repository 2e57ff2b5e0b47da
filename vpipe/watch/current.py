"""The watch of this process: as of the process group, there is one or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from vpipe.errors import RunError
from vpipe.watch.watch import Watch
from vpipe.watch.work import Work

work = Work()
"""What the main thread of this process is at."""

_watch: Watch | None = None
_stop: str | None = None


def _print(error: RunError) -> None:
    print(error.brief or error, file=sys.stderr, flush=True)


def _print_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_report: Callable[[RunError], None] = _print
_note: Callable[[str], None] = _print_note


def watch_of_process() -> Watch | None:
    """None for a pipeline in one process, and where the user made the process group."""
    return _watch


def install(watch: Watch) -> None:
    """From now on it is this process's."""
    global _watch
    _watch = watch
    watch.work, watch.note = work, _note
    if _stop is not None:
        watch.ask_stop(_stop)  # asked while this process was joining the others


def report_to(report: Callable[[RunError], None]) -> None:
    """Let a launcher's worker write down why this process is ended in the middle of its work; else stderr says so."""
    global _report
    _report = report


def note_to(note: Callable[[str], None]) -> None:
    """Let the first rank show by this what it finds of long waits, from another thread; else stderr has it."""
    global _note
    _note = note
    if _watch is not None:
        _watch.note = note


def at_work(what: str) -> AbstractContextManager[None]:
    """While the main thread does something that may keep other ranks waiting; in words, ``saving a checkpoint``.

    When they have waited for long, they are told that this is why.
    """
    return work.at(what)


def end_process(error: RunError) -> None:
    """End this process from any thread, whatever its main thread is in."""
    with suppress(Exception):
        _report(error)
    os._exit(error.exit_status)


def announce(error: BaseException) -> None:
    """Let all ranks know of an error of this one, if there are others."""
    if _watch is not None:
        _watch.failed(error)


def ask_stop(why: str) -> None:
    """Ask all ranks to leave off in good order; the first to ask gives the reason.

    A signal handler may call it, whatever it interrupts: it takes no lock and does not wait.

    Args:
        why: in a word or two, ``SIGTERM``.
    """
    global _stop
    if _stop is None:
        _stop = why
        if _watch is not None:
            _watch.ask_stop(why)


def stop_asked() -> str | None:
    """Why a rank of this job, this one or another, was asked to leave off; None while none was.

    Other ranks know within milliseconds, not all at one time: they agree on a step when one of them decides.
    """
    return _stop if _stop is not None or _watch is None else _watch.stop_asked


def forget_stop() -> None:
    """What was asked of this process was about another run than the one that begins."""
    global _stop
    _stop = None
