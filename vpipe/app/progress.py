"""Show that long work is under way: a progress line, or one sentence after two seconds; show text in any encoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from threading import Timer
from typing import Any, TypeVar

from tqdm import tqdm

SLOW_S = 2.0

LOADING_TORCH = "loading PyTorch"
"""Text for an import that takes 1.5 s of a core; ten on a machine that is busy, or has not read it before."""


def on_terminal() -> bool:
    """Return whether standard error is a terminal. A program with windows, or a service, has no standard error."""
    return sys.stderr is not None and sys.stderr.isatty()


def accept_any_text() -> None:
    """Let standard output show what its encoding lacks as ``\\u4e2d``, as standard error does, instead of failing."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def message_if_slow(text: str, show: bool = True) -> Iterator[None]:
    """Print a line on stderr if this takes longer than two seconds."""
    timer = Timer(SLOW_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if show:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


Item = TypeVar("Item")


def _as_lines() -> dict[str, Any]:
    """Return the options of a line on stderr that shows after two seconds, seldom in a file, and goes at the end."""
    return {"delay": SLOW_S, "mininterval": 0.1 if on_terminal() else 10.0, "leave": False, "file": sys.stderr,
            "disable": sys.stderr is None}


def progress(items: Iterable[Item], what: str, *, unit: str, total: int | None = None) -> Iterable[Item]:
    """Return ``items``, with a line on stderr that appears only if going through them takes over two seconds.

    ``total``: their number, where it is known and ``items`` has no length.
    """
    return tqdm(items, desc=what, unit=unit, total=total, **_as_lines())


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (bytes done, bytes in all); after two seconds a line on stderr shows them."""
    with tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, **_as_lines()) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def stage_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function to call with what is being done; after two seconds a line on stderr shows it."""
    with tqdm(bar_format="{desc}", miniters=1, **_as_lines()) as bar:

        def show(text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update()

        yield show
