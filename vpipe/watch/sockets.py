"""The TCP connections of this process, to break them off."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress

FOLDER = "/proc/self/fd"
"""Where Linux lists the open files of a process, each with what it is."""


def connections(but: Collection[int] = ()) -> dict[int, str]:
    """File descriptors of connected TCP sockets, each with the kernel's name for it; none where no system tells.

    Args:
        but: ports, at either end, of connections that do not count.
    """
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(FOLDER):
            with suppress(OSError):  # closed meanwhile, or no connected socket
                kind = os.readlink(f"{FOLDER}/{name}")
                if kind.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6) \
                                and not {copy.getsockname()[1], copy.getpeername()[1]} & set(but):
                            found[int(name)] = kind
    return found


def break_off(sockets: Mapping[int, str]) -> None:
    """Shut down those that are still what they were: whoever waits for one of them hears that it ended."""
    for descriptor, kind in sockets.items():
        with suppress(OSError):
            if os.readlink(f"{FOLDER}/{descriptor}") == kind:
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
