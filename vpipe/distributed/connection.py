"""Carry JSON objects between the ranks of a job and rank 0, over TCP or a UNIX socket, without blocking.

Find the connections of this process, to break them off; close sockets in forked children.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import Any
from weakref import WeakSet

MAX_BYTES = 1 << 28
"""Largest size of a message: a rank that sends more is none. The entries of 90,000 tensors have 10 MB."""

UNAUTHENTICATED_BYTES = 4096
"""Largest size of a message from a peer that has not shown yet that it knows the key."""

RECEIVES = 4
"""Reads from one peer at a time: one that sends without end must not keep the others waiting."""


def encoded(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent. What all ranks get is encoded once."""
    return json.dumps(message).encode() + b"\n"


BEAT = encoded({})
"""A heartbeat: the process lives."""


class HungUpError(ConnectionError):
    """The other end is gone before it said what it was waited for."""


class Connection:
    """One end of a connection that carries JSON objects, one per line. Any thread may send, one thread receives.

    Attributes:
        closed: whether the other end is gone; what it sent before was received first.
        max_bytes: that the other end may send without an end of the line; one that sends more is no rank, and closed.
    """

    def __init__(self, connected: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._socket, self._lock = connected, Lock()
        self._unsent, self._unended = bytearray(), bytearray()
        self._early: list[dict[str, Any]] = []
        self.closed, self.max_bytes = False, max_bytes
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_in_child(connected)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any] | bytes) -> None:
        """Send a message, or what :func:`encoded` made of one; what the network does not take now, :meth:`flush` sends.
        """
        with self._lock:
            self._unsent += message if isinstance(message, bytes) else encoded(message)
        self.flush()

    def flush(self) -> None:
        """Send what the network takes now."""
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[:self._socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:  # gone: who receives will find it
                self._unsent.clear()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, or some of them: the next call returns more."""
        messages, self._early = self._early, []
        lines: list[bytearray] = []
        try:
            for _ in range(RECEIVES):
                more = self._socket.recv(min(65536, self.max_bytes))
                if more == BEAT and not self._unended:  # most of what rank 0 receives
                    messages.append({})
                    continue
                self._unended += more
                if b"\n" in more:
                    *ended, self._unended = self._unended.split(b"\n")
                    lines += ended
                if not more or len(self._unended) > self.max_bytes:
                    self.closed = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            found = [None]
        if not all(isinstance(message, dict) for message in found):
            self.closed = True  # no rank
            return []
        return messages + found

    def next(self, timeout_s: float) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            HungUpError: the other end is gone.
            TimeoutError: none comes in time.
        """
        deadline, ready = monotonic() + timeout_s, select.poll()
        ready.register(self._socket, select.POLLIN)
        while not (messages := self.receive()):
            if self.closed:
                raise HungUpError("it hung up")
            if not ready.poll(1000 * max(0.0, deadline - monotonic())):
                raise TimeoutError("it did not answer")
        self._early = messages[1:]
        return messages[0]

    def end(self) -> None:
        """Send no more, and go on receiving: what was sent before arrives, as it does not if this end is closed with
        something unread, which resets the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.flush()
        self._socket.close()


# -- who is a rank -------------------------------------------------------------------------------------------------


def proof(key: str, side: str, rank: object, *nonces: object) -> str:
    """Return what only one who knows the key can say, as an answer to the random numbers of both sides."""
    return hmac.new(key.encode(), json.dumps([side, rank, *nonces]).encode(), "sha256").hexdigest()


def greet(connection: Connection) -> str:
    """Begin the handshake as rank 0; return the random number that the other side has to answer."""
    nonce = secrets.token_hex(16)
    connection.send({"nonce": nonce})
    return nonce


def admit(connection: Connection, key: str, nonce: str, answer: Mapping[str, Any]) -> int | None:
    """End the handshake as rank 0: return the rank at the other end; None for a stranger, which is told so.

    Args:
        nonce: of :func:`greet`.
        answer: of the other side.
    """
    rank, theirs, said = answer.get("rank"), answer.get("nonce"), answer.get("proof")
    if not (isinstance(rank, int) and isinstance(theirs, str) and isinstance(said, str) and said.isascii()) or \
            not hmac.compare_digest(said.encode(), proof(key, "rank", rank, nonce, theirs).encode()):
        connection.send({"proof": None})
        return None
    connection.send({"proof": proof(key, "rank 0", rank, theirs, nonce)})
    return rank


def introduce(connection: Connection, rank: int, key: str, timeout_s: float) -> None:
    """Go through the handshake as a rank: each side shows the other that it knows the key, which is not sent.

    Raises:
        HungUpError: the other side hangs up.
        OSError: it does not know the key, or does not answer in time.
    """
    try:
        nonce, theirs = secrets.token_hex(16), connection.next(timeout_s).get("nonce")
        connection.send({"rank": rank, "nonce": nonce, "proof": proof(key, "rank", rank, theirs, nonce)})
        said = connection.next(timeout_s).get("proof")
        if not isinstance(said, str) or not said.isascii() or \
                not hmac.compare_digest(said.encode(), proof(key, "rank 0", rank, nonce, theirs).encode()):
            raise ConnectionError("it is no rank of this run")
    except OSError:
        connection.close()
        raise


# -- sockets -------------------------------------------------------------------------------------------------------


def connect(address: str, port: int, timeout_s: float) -> Connection:
    """Connect to a server: a host, or the path of a UNIX socket. Raises OSError if it does not answer."""
    if not os.path.isabs(address):
        return Connection(socket.create_connection((address, port), timeout=timeout_s))
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout_s)
        connected.connect(address)
    except BaseException:
        connected.close()
        raise
    return Connection(connected)


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at a port of the address, or at a path; on all interfaces, when only others know
    the address.

    Only others know an address that is translated on the way, and a name: to its own host it often means a loopback
    address, to other hosts it does not.

    Args:
        port: 0 for any free one.
    """
    if os.path.isabs(address):
        with suppress(FileNotFoundError):
            os.unlink(address)  # of an earlier group of this run
        return socket.create_server(address, family=socket.AF_UNIX, backlog=128)
    with suppress(ValueError):
        literal = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
        family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
        try:
            return socket.create_server((str(literal), port), family=family, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", port), backlog=128)


# -- all connections of this process -----------------------------------------------------------------------------

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
