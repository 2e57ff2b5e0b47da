"""Collect the heartbeats of all ranks in the process of rank 0, and declare the first failure."""

from __future__ import annotations

import secrets
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from time import monotonic
from typing import Any

from vpipe.distributed.connection import MAX_BYTES, UNAUTHENTICATED_BYTES, Connection, listen
from vpipe.distributed.fault import Fault, WatchdogTiming
from vpipe.errors import RunError

LINGER_S = 2.0
"""When rank 0 ends: for the other ranks to hear it and hang up. What a closed connection still had to send is lost."""

TOKEN_S = 10.0
"""For who connects to send the token, which ranks do at once."""

MAX_UNAUTHENTICATED = 64
"""Connections without the token, above which the oldest is dropped: they must not use up the process's files."""


@dataclass
class _Member:
    """A rank, as the server knows it: when it was heard last, whether it ended in good order, whom it waits for, and
    what it does."""

    heard_at: float
    connection: Connection | None = None
    left: bool = False
    waits: Any = None
    at: Any = None


class WatchdogServer:
    """A thread in the process of rank 0, to which every rank keeps a connection.

    The kernel closes the connections of a process that ends, however it ends, so a killed rank is known at once; one
    that is stopped or cut off, when it was not heard for ``timing.silent_s``. The first failure is sent to all
    ranks: what a rank reports of itself comes before its end on the same connection.

    Args:
        address: where the ranks reach this process.

    Attributes:
        port, token: what a rank needs to be let in.
    """

    def __init__(self, ranks: int, timing: WatchdogTiming, address: str) -> None:
        self.token = secrets.token_hex(16)
        self.timing = timing
        self._server = listen(address)
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self._members = [_Member(monotonic()) for _ in range(ranks)]
        self._unauthenticated: dict[Connection, float] = {}  # the oldest first, with the time until which it may stay
        self._fault: Fault | None = None
        self._stop: str | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._stopping = False
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._thread = Thread(target=self._run, name="vpipe-watchdog-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send all ranks the latest state and end, when they have heard it."""
        self._stopping = True
        with suppress(OSError):
            self._wake.send(b".")
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            with suppress(Exception):
                self._declare(Fault.failed(0, RunError(
                    f"its watchdog's server ended by {type(error).__name__}: {error}",
                    hint="this is a defect of vpipe, or its memory or open files ran out")))
        finally:
            for connection in [*self._unauthenticated, *(member.connection for member in self._members
                                                         if member.connection is not None)]:
                connection.close()
            for end in (self._server, self._wake, self._woken):
                end.close()
            self._selector.close()

    def _serve(self) -> None:
        last = beat_at = monotonic()
        end_at: float | None = None
        while end_at is None or (last < end_at and self._has_listeners()):
            for key, _ in self._selector.select(max(0.0, beat_at - monotonic())):
                answer: Callable[[], None] = key.data
                answer()
            now = monotonic()
            if now - last > 2 * self.timing.beat_s:  # it was this process that paused: no rank was silent
                for member in self._members:
                    member.heard_at += now - last
            last = now
            if end_at is None:
                self._find_failure(now)
                if self._stopping:
                    self._selector.unregister(self._woken)
                    beat_at, end_at = now, now + min(LINGER_S, self.timing.grace_s)
            if now >= beat_at:
                beat_at = now + self.timing.beat_s
                self._broadcast({"ranks": [[now - member.heard_at, member.left, member.waits, member.at]
                                           for member in self._members]})
                for connection in [one for one, until in self._unauthenticated.items() if until < now]:
                    self._drop(connection)

    def _has_listeners(self) -> bool:
        """Return whether a rank could still hear something, or is about to connect: any but those that failed.

        Also one that was not heard lately: after a cut TCP waits before it sends again.
        """
        failed = () if self._fault is None else self._fault.ranks
        return any(member.connection is None or not member.connection.closed
                   for rank, member in enumerate(self._members) if rank not in failed)

    def _accept(self) -> None:
        with suppress(OSError):
            accepted, _ = self._server.accept()
            connection = Connection(accepted, UNAUTHENTICATED_BYTES)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._authenticate(connection))
            self._unauthenticated[connection] = monotonic() + min(TOKEN_S, self.timing.silent_s)
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED + len(self._members):
                self._drop(next(iter(self._unauthenticated)))

    def _drop(self, connection: Connection) -> None:
        del self._unauthenticated[connection]
        self._selector.unregister(connection)
        connection.close()

    def _authenticate(self, connection: Connection) -> None:
        """Take the sender of the token for the rank that it says; drop any other."""
        if connection not in self._unauthenticated:
            return  # dropped since it was found to have sent something
        messages = connection.receive()
        if not messages and not connection.closed:
            return
        member = self._members[messages[0]["rank"]] if messages and messages[0].get("token") == self.token else None
        if member is None or member.connection is not None:
            self._drop(connection)
            return
        del self._unauthenticated[connection]
        connection.max_bytes = MAX_BYTES
        member.connection, member.heard_at = connection, monotonic()
        self._selector.modify(connection, selectors.EVENT_READ, lambda: self._receive(member))
        if self._fault is not None:
            connection.send({"fault": self._fault.as_message()})
        if self._stop is not None:
            connection.send({"stop": self._stop})
        for message in messages[1:]:
            self._handle(member, message)

    def _receive(self, member: _Member) -> None:
        assert member.connection is not None
        for message in member.connection.receive():
            self._handle(member, message)
        if member.connection.closed:
            self._selector.unregister(member.connection)

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        member.heard_at = monotonic()
        if "waits" in message:
            member.waits, member.at = message["waits"], message.get("at")
        member.left = member.left or bool(message.get("left"))
        if "fault" in message:
            self._declare(Fault.from_message(message["fault"]))
        if "stop" in message and self._stop is None:
            self._stop = str(message["stop"])
            self._broadcast({"stop": self._stop})

    def _find_failure(self, now: float) -> None:
        """Declare the ranks that are gone, silent or absent, all of a kind in one fault."""
        if self._fault is not None:
            return
        there = {rank: member for rank, member in enumerate(self._members) if not member.left}
        if gone := [rank for rank, member in there.items() if member.connection is not None
                    and member.connection.closed]:
            self._declare(Fault.ended(*gone))
            return
        silence = {rank: now - member.heard_at for rank, member in there.items() if member.connection is not None}
        longest = max(silence.values(), default=0.0)
        if longest > self.timing.silent_s:
            at_once = longest - 3 * self.timing.beat_s
            self._declare(Fault.silent(longest, *(rank for rank, seconds in silence.items() if seconds > at_once)))
        elif absent := [rank for rank, member in there.items()
                        if member.connection is None and now - member.heard_at > self.timing.join_s]:
            self._declare(Fault.absent(self.timing.join_s, *absent))

    def _declare(self, fault: Fault) -> None:
        if self._fault is None:
            self._fault = fault
            self._broadcast({"fault": fault.as_message()})

    def _broadcast(self, message: dict[str, Any]) -> None:
        for member in self._members:
            if member.connection is not None and not member.connection.closed:
                member.connection.send(message)
