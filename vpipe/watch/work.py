"""What the main thread of a process is at, written by it and read by the thread of its watch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Work:
    """One attribute to write per action: the reader asks once a second, the writer thousands of times.

    Attributes:
        now: what is under way, and since when by ``perf_counter``: an action of a schedule; in words, ``reading a
            batch``; None outside of the pipeline, in the program that runs it.
        part: what it is a part of, ``evaluating``.
    """

    __slots__ = ("now", "part")

    def __init__(self) -> None:
        self.now: tuple[object, float] = (None, perf_counter())
        self.part: str | None = None

    def rest(self) -> None:
        """No action is under way."""
        self.now = (self.part, perf_counter())

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """While this is done, whatever actions it is made of; ``what`` in words."""
        before, self.part = self.part, what
        self.rest()
        try:
            yield
        finally:
            self.part = before
            self.rest()

    def seen(self) -> tuple[str | None, float]:
        """What is under way, in words, and for how many seconds."""
        (what, since), part = self.now, self.part
        words = what if what is None or isinstance(what, str) else f"running {what}"
        return (f"{words} ({part})" if part not in (None, words) else words), perf_counter() - since
