"""Keep processors awake while devices sleep.

A rank whose device sleeps leaves its processor idle, as no rank does that computes. An idle processor is halted, which
on a virtual machine hands it to somebody else: what runs next begins late, with cold caches and at a lower pace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A spin lock that is taken twice spins for ever, with the instruction that leaves a processor's units to its neighbour.
_SPIN = """
import ctypes, os, signal, sys
libc, lock = ctypes.CDLL(None), ctypes.c_int()
libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # when the parent ends
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
libc.pthread_spin_init(ctypes.byref(lock), 0)
for _ in range(2):
    libc.pthread_spin_lock(ctypes.byref(lock))
"""


@contextmanager
def awake() -> Iterator[None]:
    """Let a loop run on every processor of this process at the lowest priority, which any rank interrupts at once."""
    spins = [subprocess.Popen([sys.executable, "-S", "-E", "-c", _SPIN, str(processor)])
             for processor in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for spin in spins:
            spin.kill()
            spin.wait()
