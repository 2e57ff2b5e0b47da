"""A connection that carries JSON objects, one per line, and never blocks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from threading import Lock
from typing import Any

MOST_BYTES = 1 << 20
"""Unsent, above which what is said is dropped (a beat more or less), and unended, above which a peer is no rank."""


class Line:
    """One end. Any thread may say something, one thread hears.

    Attributes:
        closed: whether the other end is gone; what it said before was heard first.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock = connection, Lock()
        self._unsent, self._unended = b"", b""
        self.closed = False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A child that was forked must not keep the connection up when this process is gone.
        os.register_at_fork(after_in_child=connection.close)

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
        """What has arrived."""
        try:
            while more := self._socket.recv(65536):
                self._unended += more
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._unended = self._unended.split(b"\n")
        try:
            said = [json.loads(line) for line in lines]
        except ValueError:
            said = [None]
        if len(self._unended) > MOST_BYTES or not all(isinstance(message, dict) for message in said):
            self.closed = True  # a stranger
            return []
        return said

    def close(self) -> None:
        self.flush()
        self._socket.close()


def connect(host: str, port: int, timeout_s: float) -> Line:
    """A line to who listens there.

    Raises:
        OSError: nobody does, or there is no way.
    """
    return Line(socket.create_connection((host, port), timeout=timeout_s))


def listen() -> socket.socket:
    """A socket that listens at a free port on all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", 0), backlog=128)
