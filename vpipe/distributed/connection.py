"""Carry JSON objects over TCP without blocking, and break off this process's connections."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakSet

MOST_BYTES = 1 << 20
"""Unsent, above which what is said is dropped (a beat more or less), and unended, above which a peer is no rank."""

STRANGERS_BYTES = 4096
"""The same of a peer that has not said yet who it is."""

RECEIVES = 4
"""From one peer at a time: who sends without end must not keep the others waiting."""

_lines: WeakSet[Connection] = WeakSet()


class Connection:
    """One end. Any thread may say something, one thread hears.

    Attributes:
        closed: whether the other end is gone; what it said before was heard first.
        most_bytes: that the other end may say without an end of the line; who says more is no rank, and gone.
    """

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES) -> None:
        self._socket, self._lock = connection, Lock()
        self._unsent, self._unended = b"", b""
        self.closed, self.most_bytes = False, most_bytes
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _lines.add(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, message: Mapping[str, Any]) -> None:
        """Send, or keep until :meth:`flush` what the network does not take now."""
        with self._lock:
            if len(self._unsent) < MOST_BYTES:
                self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what was kept."""
        with self._lock:
            try:
                while self._unsent:
                    self._unsent = self._unsent[self._socket.send(self._unsent):]
            except OSError:
                pass  # full: next time; gone: whoever hears will know

    def hear(self) -> list[dict[str, Any]]:
        """What has arrived, or a part of it: more is heard the next time."""
        lines: list[bytes] = []
        try:
            for _ in range(RECEIVES):
                more = self._socket.recv(min(65536, self.most_bytes))
                *whole, self._unended = (self._unended + more).split(b"\n")
                lines += whole
                if not more or len(self._unended) > self.most_bytes:
                    self.closed = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        try:
            said = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            said = [None]
        if not all(isinstance(message, dict) for message in said):
            self.closed = True  # a stranger
            return []
        return said

    def close(self) -> None:
        self.flush()
        self._socket.close()


def connect(host: str, port: int, timeout_s: float) -> Connection:
    """A line to who listens there.

    Raises:
        OSError: nobody does, or there is no way.
    """
    return Connection(socket.create_connection((host, port), timeout=timeout_s))


def listen(address: str) -> socket.socket:
    """A socket that listens at a free port of the address; on all interfaces, when only others know the address.

    So it is with an address that is translated on the way, and with a name, which to its own host often means a
    loopback address and to other hosts does not.
    """
    with suppress(ValueError):
        literal = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
        family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
        try:
            return socket.create_server((str(literal), 0), family=family, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", 0), backlog=128)


def _close_in_child() -> None:
    """A child that was forked must not keep a connection up when this process is gone."""
    for line in list(_lines):
        line._socket.close()


os.register_at_fork(after_in_child=_close_in_child)


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
