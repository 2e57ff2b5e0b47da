"""Time for a rank to say what it saw, when its starter ends it because another one failed."""

from __future__ import annotations

import os
import signal
import time
from threading import Thread

LAST_WORDS_S = 5.0
"""To notice that a rank is gone, to let its neighbour speak first, and to speak."""


def take_time_to_speak() -> None:
    """Let SIGTERM end this process after a few seconds, whatever it is waiting for, instead of at once.

    torchrun ends all ranks as soon as one ends with an error or is killed, and srun may, before the one that knows why
    has said it. Of a rank that is killed the starter names its number and perhaps the node; its stage, and who was
    waiting for it, the others say when they find that it is gone. Then they end by themselves. To be called by the
    main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # is told at once, even while the main thread waits in a library
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    def wait() -> None:
        while signal.SIGTERM not in os.read(reader, 1):
            pass
        time.sleep(LAST_WORDS_S)
        os._exit(128 + signal.SIGTERM)

    Thread(target=wait, daemon=True).start()


def end_as_decided() -> None:
    """Let no SIGTERM change the exit status any more: as it ends, Python gives up its own handlers of signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
