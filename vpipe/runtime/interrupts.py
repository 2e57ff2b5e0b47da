"""Let Ctrl-C wait until the pipeline is whole, where a script or a notebook runs all ranks in one process.

A handler of the user's stays, and so do the signals of a job of several processes (:mod:`vpipe.app.signals`).
"""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType


class Interrupts:
    """While this context is entered, note a first Ctrl-C and raise it at its end; a second one is raised at once.

    Contexts may be nested: what counts is the end of the outermost. Code of the user that may take long, such as the
    loop over the steps, belongs outside.

    Args:
        alone: whether there are no other processes; else nothing waits.

    Attributes:
        noted: whether one came that was not raised yet.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone, self._depth, self.noted = alone, 0, False
        self._handler = self._note

    def __enter__(self) -> None:
        if (self._alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler
                and current_thread() is main_thread()):
            self._depth, self.noted = 0, False
            signal.signal(signal.SIGINT, self._handler)  # until this line one is raised, but nothing has begun
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if self._depth == 0 and signal.getsignal(signal.SIGINT) is self._handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if error is None:
                self.raise_noted()

    def raise_noted(self) -> None:
        """Raise KeyboardInterrupt if one was noted."""
        if self.noted:
            self.noted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.raise_noted()
        self.noted = True
