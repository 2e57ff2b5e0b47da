"""Print an error that nobody caught: on one rank, with the lines of the user's own code and without vpipe's."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType

from vpipe.distributed.watchdog import current_watchdog
from vpipe.errors import UserError, VpipeError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

HIDDEN = frozenset({"vpipe", "torch", "numpy", "pydantic", "yaml", "tokenizers", "h5py", "tqdm", "safetensors"})
"""Packages whose lines are no user's: vpipe, and what it stands on."""

STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep

WAIT_S = 2.0
"""Before a rank ends because of another rank's error: torchrun ends all ranks as soon as one has ended, and that is to
be the one that reports the error."""


def install() -> None:
    """Print uncaught errors as this module says from now on; a hook of the user's prints what is not hidden."""
    hook = sys.excepthook
    if not (isinstance(hook, partial) and hook.func is _excepthook):
        sys.excepthook = partial(_excepthook, hook)


def _excepthook(previous: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error, or leave that to another rank; then end with the error's exit status.

    Raises:
        SystemExit: Python ends with its status; an interactive session goes on.
    """
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    watch = None if interactive else current_watchdog()
    brief = error.brief if isinstance(error, VpipeError) else None
    if watch is not None and brief is None:
        brief = watch.reported_by_another(error)
    if brief is not None:
        with suppress(KeyboardInterrupt):
            time.sleep(WAIT_S)
        print(brief, file=sys.stderr, flush=True)
        raise SystemExit(_status(error))
    if isinstance(error, VpipeError):
        if watch is None and os.environ.get("RANK", "0") != "0":
            time.sleep(WAIT_S)  # before the ranks joined: rank 0 finds the same, and prints it
        text = report(error)
    else:
        text = "".join(traceback.format_exception_only(error)).rstrip()
    hide_frames(error)
    if isinstance(error, VpipeError) and _is_plain(previous):
        print(text, file=sys.stderr, flush=True)
    else:
        if watch is not None:
            print(f"{watch.place(watch.rank)} failed:", file=sys.stderr, flush=True)
        previous(kind, error, error.__traceback__)
    if interactive:
        return
    write_error_file(text)
    if isinstance(error, VpipeError):
        raise SystemExit(error.exit_status)


def report(error: VpipeError) -> str:
    """Return an error with the lines of the user's code that led to it: before the remedy, if there is one of them."""
    frames = error.frames or user_frames(error)
    if isinstance(error, UserError) and len(error.problems) > 1:
        return f"{error}\n{frames}".rstrip()
    what, mark, hint = str(error).partition("\nhint: ")
    return f"{what}\n{frames}{mark.lstrip()}{hint}"


def user_frames(error: BaseException) -> str:
    """Return the lines of the user's code in the traceback of an error, and in that of its cause if it is vpipe's."""
    text, seen = "", set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        text += "".join(traceback.format_tb(_without_hidden(one.__traceback__)))
        one = one.__cause__ if isinstance(one, VpipeError) else None
    return text


def hide_frames(error: BaseException) -> None:
    """Take vpipe's frames out of the tracebacks of an error and of those behind it, unless they show a defect of vpipe:
    an error that it did not raise on purpose, and the user's code did not raise."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        frames = [link.tb_frame for link in _links(one.__traceback__)]
        last = max((number for number, frame in enumerate(frames) if _package(frame) == "vpipe"), default=None)
        if last is not None and (isinstance(one, (VpipeError, KeyboardInterrupt))
                                 or any(map(_is_users, frames[last:]))):
            one.__traceback__ = _without_hidden(one.__traceback__)
        one = one.__cause__ if one.__cause__ is not None or one.__suppress_context__ else one.__context__


def write_error_file(text: str) -> None:
    """Write the error for the summary of torchrun, if it started this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        with suppress(OSError), open(path, "x") as file:
            json.dump({"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)


def _status(error: BaseException) -> int:
    if isinstance(error, VpipeError):
        return error.exit_status
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _is_plain(hook: Hook) -> bool:
    """Return whether a hook is Python's own or torch's, which prints the same with the rank."""
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch.")


def _without_hidden(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback of the user's frames alone; None where there is none."""
    result: TracebackType | None = None
    for link in reversed(list(_links(trace))):
        if _is_users(link.tb_frame):
            result = TracebackType(result, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return result


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _package(frame: FrameType) -> str:
    """Return the package of a frame's module; where ``python -m`` runs the module, its name is ``__main__``."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__", "") if spec is None else spec.name).partition(".")[0]


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return (_package(frame) not in HIDDEN and not file.startswith("<frozen ")
            and (not file.startswith(STANDARD_LIBRARY) or "-packages" in file))
