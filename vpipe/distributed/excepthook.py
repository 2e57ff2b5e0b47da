"""Print an error that nobody caught: on one of several ranks, with the lines of the user's code and without vpipe's."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType

from vpipe.distributed.watchdog import watch
from vpipe.errors import VpipeError, is_users, links, package, without_hidden, write_error_file

WAIT_S = 2.0
"""Time before a rank ends because of another rank's error: torchrun ends all ranks as soon as one has ended, and that
is to be the one that reports the error."""


def install() -> None:
    """Print this rank's uncaught errors as this module says from now on, if they are Python's to print.

    A hook of the program's stays, and so does that of an interactive session. torch puts a hook of its own before the
    one that it finds, which writes the rank before each line.
    """
    hook = sys.excepthook
    if getattr(hook, "__module__", "").startswith("torch."):
        inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        hook = next(filter(callable, inner), hook)
    if hook is sys.__excepthook__ and not (hasattr(sys, "ps1") or sys.flags.interactive):
        sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error, or leave that to another rank; then end with the error's exit status.

    Raises:
        SystemExit: Python ends with its status.
    """
    watchdog = watch.watchdog
    brief = error.brief if isinstance(error, VpipeError) else None
    if watchdog is not None and brief is None:
        brief = watchdog.reported_by_another(error)
    if brief is not None:
        with suppress(KeyboardInterrupt):
            time.sleep(WAIT_S)
        print(brief, file=sys.stderr, flush=True)
        otherwise = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        raise SystemExit(error.exit_status if isinstance(error, VpipeError) else otherwise)
    if isinstance(error, VpipeError):
        if watchdog is None and os.environ.get("RANK", "0") != "0":
            time.sleep(WAIT_S)  # before the ranks joined: rank 0 finds the same, and prints it
        error.show()
        raise SystemExit(error.exit_status)
    hide_frames(error)
    if watchdog is not None:
        print(f"{watchdog.place(watchdog.rank)} failed:", file=sys.stderr, flush=True)
    sys.__excepthook__(kind, error, error.__traceback__)
    write_error_file("".join(traceback.format_exception_only(error)).rstrip())


def hide_frames(error: BaseException) -> None:
    """Take vpipe's frames out of the tracebacks of an error and of those that led to it, unless they show a defect of
    vpipe: an error that it did not raise on purpose, and the user's code did not raise."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        frames = [link.tb_frame for link in links(one.__traceback__)]
        last = max((number for number, frame in enumerate(frames) if package(frame) == "vpipe"), default=None)
        if last is not None and (isinstance(one, (VpipeError, KeyboardInterrupt))
                                 or any(map(is_users, frames[last:]))):
            one.__traceback__ = without_hidden(one.__traceback__)
        one = one.__cause__ if one.__cause__ is not None or one.__suppress_context__ else one.__context__
