"""Handle signals that ask a rank to end: in training it saves first, at any other time it ends at once or soon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, Timer
from typing import NamedTuple

from vpipe.distributed.environment import PARENT_PIPE
from vpipe.distributed.watchdog import ask_stop

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks for an end: a launcher, torchrun and srun send SIGTERM, a terminal SIGINT, and SLURM before the time limit
or a pre-emption what ``--signal`` says, mostly SIGUSR1."""

UNSAVED = 64
"""The exit status of a rank that its launcher asked to end is 128 + the signal's number where it has saved, else this
and the number: so the launcher knows."""

LAST_WORDS_S = 5.0
"""To notice that a rank is gone, to let its neighbour speak first, and to speak."""


class Stopped(NamedTuple):
    """The signal that ended a training before its end.

    Attributes:
        by: the name of the signal.
        saved: whether the state after the last step is in a checkpoint.
    """

    by: str
    saved: bool


class _Stops:
    """The handling of signals in this process.

    Args:
        patience_s: outside training, until it is ended.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.training = self.concluding = self.decided = False
        self.asked: signal.Signals | None = None
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)  # is told at once, even while the main thread waits in a library
        for number in STOPS:
            signal.signal(number, lambda number, frame: None)
        Thread(target=self._obey, name="vpipe-stops", daemon=True).start()

    def _obey(self) -> None:
        while True:
            for byte in os.read(self._reader, 64):
                if byte in STOPS:
                    self.ask(signal.Signals(byte))

    def ask(self, number: signal.Signals) -> None:
        if self.decided or (self.concluding and not self.patience_s):
            return
        self.asked = self.asked or number
        if self.training:
            ask_stop(number.name)
        elif self.patience_s:
            self.end_late(number)
        else:
            os._exit(status_after(number, saved=False))

    def end_late(self, number: signal.Signals) -> None:
        """End the process in a while, whatever it waits for, unless it trains by then."""
        def end() -> None:
            if self.training:
                ask_stop(number.name)
            else:
                os._exit(status_after(number, saved=False))

        timer = Timer(self.patience_s, end)
        timer.daemon = True
        timer.start()


def status_after(number: int, *, saved: bool) -> int:
    """Return the exit status of a process that a signal ends: 128 + SIGUSR1 tells a script that the run was saved."""
    if not saved and PARENT_PIPE in os.environ:
        return UNSAVED + number
    return 1 if number == signal.SIGUSR1 and not saved else 128 + number


_stops: _Stops | None = None


def listen(patience_s: float = 0.0) -> None:
    """Handle signals as this module says from now on.

    torchrun ends all ranks as soon as one ends with an error or is killed, and srun may, before the one that knows why
    has said it. Of a rank that is killed the starter names its number and perhaps the node; its stage, and who was
    waiting for it, the others say when they find that it is gone. Then they end by themselves. To be called by the
    main thread.

    Args:
        patience_s: outside training, from the signal to the end of the process; 0 where nobody needs last words.
    """
    global _stops
    _stops = _Stops(patience_s)


def ask(number: int) -> None:
    """Handle a signal that the launcher passes on, as if it had come to this process, which must :func:`listen`."""
    assert _stops is not None, "it listens"
    _stops.ask(signal.Signals(number))


@contextmanager
def in_good_order() -> Iterator[None]:
    """While training, let a signal only ask all ranks to stop: the caller reads
    :func:`~vpipe.distributed.watchdog.stop_asked`. A second signal does nothing.

    Afterwards the process is about to end by itself, and a launcher's signal does not end it sooner: it may be the very
    one for which the other ranks have made all leave off.

    A process that does not :func:`listen` is left as it is.
    """
    stops = _stops
    if stops is None:
        yield
        return
    if stops.asked is not None and stops.patience_s:
        ask_stop(stops.asked.name)  # it came a moment ago
    stops.training, stops.concluding = True, False
    try:
        yield
        stops.concluding = True
    except BaseException:
        if stops.asked is not None and stops.patience_s:
            stops.end_late(stops.asked)  # its starter ended it because another rank failed
        raise
    finally:
        stops.training = False


def end_as_decided() -> None:
    """Ignore further signals: Python restores the default handlers at exit, and one could change the exit status."""
    if _stops is not None:
        _stops.decided = True
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def stopped_status(rank: int, stopped: Stopped | None) -> int:
    """Return the exit status of a rank whose training ended well.

    Args:
        stopped: by a signal, before its end. Then the first rank says so, once it has saved; if others did, srun would
            end it meanwhile.
    """
    return 0 if stopped is None or rank else status_after(signal.Signals[stopped.by], saved=stopped.saved)
