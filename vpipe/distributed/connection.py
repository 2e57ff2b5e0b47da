"""Carry JSON objects between watchdogs over TCP without blocking, and break off this process's connections."""

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

MAX_BYTES = 1 << 20
"""Unsent bytes, above which a message is dropped (a beat more or less); and bytes without an end of the line, above
which the peer is no rank."""

UNAUTHENTICATED_BYTES = 4096
"""The same of a peer that has not sent the token yet."""

RECEIVES = 4
"""From one peer at a time: one that sends without end must not keep the others waiting."""

_connections: WeakSet[Connection] = WeakSet()


class Connection:
    """One end of a connection that carries JSON objects, one per line. Any thread may send, one thread receives.

    Attributes:
        closed: whether the other end is gone; what it sent before was received first.
        max_bytes: that the other end may send without an end of the line; one that sends more is no rank, and closed.
    """

    def __init__(self, connected: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._socket, self._lock = connected, Lock()
        self._unsent, self._unended = b"", b""
        self.closed, self.max_bytes = False, max_bytes
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _connections.add(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; keep what the network does not take now for the next time."""
        with self._lock:
            if len(self._unsent) < MAX_BYTES:
                self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            try:
                while self._unsent:
                    self._unsent = self._unsent[self._socket.send(self._unsent):]
            except OSError:
                pass  # full: next time; gone: who receives will find it

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, or some of them: the next call returns more."""
        lines: list[bytes] = []
        try:
            for _ in range(RECEIVES):
                more = self._socket.recv(min(65536, self.max_bytes))
                *whole, self._unended = (self._unended + more).split(b"\n")
                lines += whole
                if not more or len(self._unended) > self.max_bytes:
                    self.closed = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if not all(isinstance(message, dict) for message in messages):
            self.closed = True  # no rank
            return []
        return messages

    def close(self) -> None:
        self._flush()
        self._socket.close()


def connect(host: str, port: int, timeout_s: float) -> Connection:
    """Connect to a server. Raises OSError if it does not answer."""
    return Connection(socket.create_connection((host, port), timeout=timeout_s))


def listening_socket(address: str) -> socket.socket:
    """Return a socket that listens at a free port of the address; on all interfaces, when only others know it.

    Only others know an address that is translated on the way, and a name: to its own host it often means a loopback
    address, to other hosts it does not.
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
    """Close the connections in a forked child, which would keep them up when this process is gone."""
    for connection in list(_connections):
        connection._socket.close()


os.register_at_fork(after_in_child=_close_in_child)


FOLDER = "/proc/self/fd"
"""Where Linux lists the open files of a process, each with what it is."""


def connections(but: Collection[int] = ()) -> dict[int, str]:
    """Return the descriptors of connected TCP sockets, each with the kernel's name for it; none outside of Linux.

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
    """Shut down those that are still what they were: a thread that waits for one of them sees its end."""
    for descriptor, kind in sockets.items():
        with suppress(OSError):
            if os.readlink(f"{FOLDER}/{descriptor}") == kind:
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
