"""Find the connections of this process, to break them off; close sockets in forked children."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from weakref import WeakSet

FOLDER = "/proc/self/fd"
"""Where Linux lists the open files of a process, each with what it is."""


_not_for_children: WeakSet[socket.socket] = WeakSet()


def close_in_child(own: socket.socket) -> None:
    """Close a socket in every forked child, which would keep a connection up when this process is gone."""
    _not_for_children.add(own)


def _close_in_child() -> None:
    for own in _not_for_children:
        own.close()


os.register_at_fork(after_in_child=_close_in_child)


def connections(but: Collection[int] = ()) -> dict[int, str]:
    """Return the descriptors of connected TCP sockets, each with the kernel's name for it; none outside of Linux.

    Args:
        but: ports, at either end, of connections that do not count.
    """
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(FOLDER):
            with suppress(OSError):  # closed meanwhile, or not connected
                kind = os.readlink(f"{FOLDER}/{name}")
                if kind.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6) \
                                and not {copy.getsockname()[1], copy.getpeername()[1]} & set(but):
                            found[int(name)] = kind
    return found


def break_off(sockets: Mapping[int, str]) -> None:
    """Shut down connections that are still what they were: a thread that waits for one of them sees its end."""
    for descriptor, kind in sockets.items():
        with suppress(OSError):
            if os.readlink(f"{FOLDER}/{descriptor}") == kind:
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
