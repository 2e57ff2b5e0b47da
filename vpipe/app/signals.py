"""Handle signals that ask a rank to end: in training it saves first, at any other time it ends at once or soon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, Timer
from typing import NamedTuple

from vpipe.distributed import watch

PARENT_PIPE = "VPIPE_PARENT_PIPE"
"""The variable with a file descriptor that ends when the launcher does, and then so must the rank. A byte in it is the
number of a signal that the launcher passes on: unlike a signal it loses none that comes while Python starts, and
reaches nothing else."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks for an end: a launcher, torchrun and srun send SIGTERM, a terminal SIGINT, and SLURM before the time limit
or a pre-emption what ``--signal`` says, mostly SIGUSR1."""

UNSAVED = 64
"""The exit status of a rank that its launcher asked to end is 128 + the signal's number where it has saved, else this
and the number: so the launcher knows."""

REPORT_S = 5.0
"""Time to notice that a rank is gone, to let its neighbour report first, and to report."""


class Stopped(NamedTuple):
    """The signal that ended a training before its end.

    Attributes:
        by: the name of the signal.
        saved: whether the state after the last step is in a checkpoint.
    """

    by: str
    saved: bool


class _Handlers:
    """The handling of signals in this process; ``delay_s`` as in :func:`handle_signals`."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.training = self.trained = self.ignoring = False
        self.first: signal.Signals | None = None
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)  # is written at once, even while the main thread waits in a library
        for number in STOPS:
            signal.signal(number, lambda number, frame: None)
        Thread(target=self._read, name="vpipe-signals", daemon=True).start()

    def _read(self) -> None:
        while True:
            for byte in os.read(self._reader, 64):
                if byte in STOPS:
                    self.handle(signal.Signals(byte))

    def handle(self, number: signal.Signals) -> None:
        if self.ignoring or (self.trained and not self.delay_s):
            return
        self.first = self.first or number
        if self.delay_s and not self.training:
            self.end_late(number)
        else:
            self._stop(number)

    def end_late(self, number: signal.Signals) -> None:
        """End the process in a while, whatever it waits for, unless it trains by then."""
        timer = Timer(self.delay_s, self._stop, (number,))
        timer.daemon = True
        timer.start()

    def _stop(self, number: signal.Signals) -> None:
        if self.training:
            watch.ask_stop(number.name)
        else:
            os._exit(status_after(number, saved=False))


_handlers: _Handlers | None = None


def status_after(number: int, *, saved: bool) -> int:
    """Return the exit status of a process that a signal ends: 128 + SIGUSR1 tells a script that the run was saved."""
    if not saved and PARENT_PIPE in os.environ:
        return UNSAVED + number
    return 1 if number == signal.SIGUSR1 and not saved else 128 + number


def handle_signals(delay_s: float = 0.0) -> None:
    """Handle signals as this module says from now on. To be called by the main thread.

    torchrun ends all ranks as soon as one ends with an error or is killed, and srun may, before the rank that knows why
    has reported it. Of a killed rank the starter names the number and perhaps the node; its stage, and who was waiting
    for it, the others report when they find that it is gone. Then they end by themselves.

    Args:
        delay_s: outside training, from the signal to the end of the process; 0 where it has nothing to report.
    """
    global _handlers
    _handlers = _Handlers(delay_s)


def handle_signal(number: int) -> None:
    """Handle a signal that the launcher passes on, as if it had come to this process; needs :func:`handle_signals`."""
    assert _handlers is not None
    _handlers.handle(signal.Signals(number))


@contextmanager
def graceful_stop() -> Iterator[None]:
    """While training, let a signal only ask all ranks to stop: the caller reads
    ``watch.stop_asked``. A second signal does nothing.

    Afterwards the process is about to end by itself, and a launcher's signal does not end it sooner: it may be the very
    one for which the other ranks have stopped all. A process without :func:`handle_signals` is left as it is.
    """
    handlers = _handlers
    if handlers is None:
        yield
        return
    if handlers.first is not None and handlers.delay_s:
        watch.ask_stop(handlers.first.name)  # it came a moment ago
    handlers.training, handlers.trained = True, False
    try:
        yield
        handlers.trained = True
    except BaseException:
        if handlers.first is not None and handlers.delay_s:
            handlers.end_late(handlers.first)  # its starter ended it because another rank failed
        raise
    finally:
        handlers.training = False


def ignore_signals() -> None:
    """Ignore further signals: Python restores the default handlers at exit, and one could change the exit status."""
    if _handlers is not None:
        _handlers.ignoring = True
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def stopped_status(rank: int, stopped: Stopped | None) -> int:
    """Return the exit status of a rank whose training ended well.

    Args:
        stopped: the signal that stopped it, if any. Only the status of rank 0 tells of it, once it has saved; if others
            ended with such a status, srun would end rank 0 meanwhile.
    """
    return 0 if stopped is None or rank else status_after(signal.Signals[stopped.by], saved=stopped.saved)
