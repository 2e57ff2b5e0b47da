"""Detect failures in the process of rank 0, from the connections and heartbeats of all ranks: a killed rank first here.

A heartbeat is an empty message: the process lives. What a rank waits for or does, its state, stays there; when a rank
asks, all send their states here, and all get them.

Each rank's side is :mod:`~vpipe.distributed.watchdog`. The values that ranks exchange pass through here, too: see
:mod:`~vpipe.distributed.value_exchange`.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from threading import Thread
from time import monotonic
from typing import Any

from vpipe.distributed.connection import (
    MAX_BYTES,
    UNAUTHENTICATED_BYTES,
    Connection,
    admit,
    close_in_child,
    encoded,
    greet,
    listening_socket,
)
from vpipe.distributed.fault import Fault
from vpipe.distributed.value_exchange import Relay
from vpipe.errors import RunError

LINGER_S = 2.0
"""Time for the other ranks to hear that rank 0 ends, and hang up: what a closed connection had to send is lost."""

PROOF_S = 10.0
"""Time for a process that connects to show that it knows the key, which ranks do at once."""

MAX_UNAUTHENTICATED = 64
"""Number of connections that have not shown it, above which the oldest is dropped: they must not use up files."""


@dataclass(frozen=True)
class WatchdogTiming:
    """Seconds that follow from the timeout of a job, so that all is over when it is.

    Attributes:
        beat_s: between two heartbeats.
        silent_s: without any, after which a rank counts as lost.
        grace_s: for a process that knows of a failure to report it, before it is ended.
        long_s: a wait that is reported, with who waits for whom.
        join_s: what a rank may take to connect for the first time.
    """

    beat_s: float
    silent_s: float
    grace_s: float
    long_s: float
    join_s: float = 60.0

    @classmethod
    def from_timeout(cls, timeout_s: float) -> WatchdogTiming:
        """Return the timing for a timeout.

        For 60 s: a heartbeat per second, long after 30 s, silent after 45 s, 5 s of grace. The rest is for processes to
        end, which takes half a second on a quiet machine and ten on a busy one.
        """
        return cls(min(1.0, timeout_s / 20), timeout_s - min(15.0, 0.4 * timeout_s), min(5.0, timeout_s / 6),
                   timeout_s / 2, timeout_s)


@dataclass(frozen=True)
class Wait:
    """A wait for rank ``peer``, or for all (None); ``purpose`` as in ``Transfer.purpose``, None while it is new."""

    peer: int | None
    seconds: float
    purpose: str | None = None


@dataclass(frozen=True)
class RankState:
    """The state of a rank as the others know it once they have asked for the states of all.

    Attributes:
        silent_s: since it was heard.
        left: whether its program came to its end.
        waits: for whom.
        at: its activity, and for how long; None when that changed a moment ago.
    """

    silent_s: float = 0.0
    left: bool = False
    waits: Wait | None = None
    at: tuple[str | None, float] | None = None

    @property
    def waited_s(self) -> float:
        """Seconds for which it has waited; 0 for a rank that left."""
        return 0.0 if self.waits is None or self.left else self.waits.seconds


@dataclass
class _Member:
    """A rank, as rank 0 knows it; ``state``: the latest that it has sent, its ``waits`` and ``at``."""

    rank: int
    heard_at: float
    connection: Connection | None = None
    left: bool = False
    heard: bool = False  # of the failure
    state: Sequence[Any] = (None, None)
    unsent: bool = False  # whether the selector waits until more can be sent


class FailureDetector:
    """A thread in the process of rank 0, to which every rank keeps a connection.

    The kernel closes the connections of a process that ends, however it ends, so a killed rank is known at once; one
    that is stopped or cut off, when it was not heard for ``timing.silent_s``. The first failure is sent to all
    ranks: what a rank reports of itself comes before its end on the same connection. Once all ranks have connected,
    nobody can any more.

    Args:
        address, port: where the ranks reach this process, see :func:`~vpipe.distributed.connection.listening_socket`.
        key: which the ranks know, and nobody else.

    Attributes:
        port: at which it listens; 0 at a path.
    """

    def __init__(self, ranks: int, timing: WatchdogTiming, address: str, key: str, port: int = 0) -> None:
        self.timing, self._key = timing, key
        self._server = listening_socket(address, port)
        self._server.setblocking(False)
        close_in_child(self._server)
        self.port = 0 if self._server.family == socket.AF_UNIX else int(self._server.getsockname()[1])
        self._members = [_Member(rank, monotonic()) for rank in range(ranks)]
        self._refused = 0
        self._unauthenticated: dict[Connection, tuple[float, str]] = {}
        """The oldest first, with the time until which it may stay, and what it has to answer."""
        self._fault: Fault | None = None
        self._claims: list[Fault] = []  # of the ranks, since failures were looked for
        self._gone: list[_Member] = []  # whose connections were closed since then
        self._left: list[int] = []  # ranks that ended their programs since the last heartbeat
        self._states_wanted, self._states_asked_at = False, -inf
        self._awaited: set[int] | None = None  # ranks whose states are still to come, once all were asked
        self._relay = Relay(ranks, self._claims.append)
        self._stops: dict[str, str] = {}  # why, by what is asked to stop
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._stopping = False
        self._selector.register(self._woken, selectors.EVENT_READ, lambda events: None)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._thread = Thread(target=self._run, name="vpipe-failure-detector", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell all ranks who has left and end, when they have heard it."""
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
            for connection in [*self._unauthenticated, *(member.connection for member in self._members)]:
                if connection is not None:
                    connection.close()
            for end in (self._server, self._wake, self._woken):
                end.close()
            self._selector.close()

    def _serve(self) -> None:
        last = beat_at = monotonic()
        end_at: float | None = None
        while end_at is None or (last < end_at and self._has_listeners()):
            waits = self._states_wanted or self._awaited is not None
            wake_at = min(beat_at, self._states_asked_at + self.timing.beat_s) if waits else beat_at
            for key, events in self._selector.select(max(0.0, wake_at - monotonic())):
                key.data(events)
            now = monotonic()
            if now - last > 2 * self.timing.beat_s:  # it was this process that paused: no rank was silent
                for member in self._members:
                    member.heard_at += now - last
            last = now
            # Most of what arrives are heartbeats, a thousand a second from a thousand ranks: nothing here goes through
            # all ranks for each.
            if now >= beat_at or self._claims or self._gone:
                self._find_failure(now, ending=end_at is not None)
            if end_at is None and self._stopping:
                self._selector.unregister(self._woken)
                beat_at, end_at = now, now + min(LINGER_S, self.timing.grace_s)
            if now >= beat_at:
                beat_at = now + self.timing.beat_s
                self._beat(now)
            if self._states_wanted or self._awaited is not None:
                self._gather_states(now)

    def _beat(self, now: float) -> None:
        left, self._left = self._left, []
        self._broadcast({"left": left} if left else {})
        for connection in [one for one, (until, _) in self._unauthenticated.items() if until < now]:
            self._drop(connection)

    def _gather_states(self, now: float) -> None:
        """Ask all ranks for their states, at most once per heartbeat; send all of them to all when they are there, or
        when a heartbeat is over: silent ranks do not answer."""
        over = now >= self._states_asked_at + self.timing.beat_s
        if self._awaited is None and over:
            self._states_asked_at = now
            self._awaited = {member.rank for member in self._members if not member.left
                             and member.connection is not None and not member.connection.closed}
            self._broadcast({"ask": True})
        elif self._awaited is not None and (over or not self._awaited):
            self._states_wanted, self._awaited = False, None
            self._broadcast({"states": [[now - member.heard_at, member.left, *member.state]
                                        for member in self._members]})

    def _has_listeners(self) -> bool:
        """Return whether a rank could still hear something, or is about to connect: any but those that failed.

        Also one that was not heard lately: after a cut TCP waits before it sends again.
        """
        failed = () if self._fault is None else self._fault.ranks
        return any(member.connection is None or not (member.connection.closed or member.heard)
                   for rank, member in enumerate(self._members) if rank not in failed)

    def _accept(self, events: int) -> None:
        with suppress(OSError):
            accepted, _ = self._server.accept()
            connection = Connection(accepted, UNAUTHENTICATED_BYTES)
            self._selector.register(connection, selectors.EVENT_READ, lambda events: self._authenticate(connection))
            self._unauthenticated[connection] = monotonic() + min(PROOF_S, self.timing.silent_s), greet(connection)
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED + len(self._members):
                self._drop(next(iter(self._unauthenticated)))

    def _drop(self, connection: Connection) -> None:
        del self._unauthenticated[connection]
        self._selector.unregister(connection)
        connection.close()

    def _authenticate(self, connection: Connection) -> None:
        """Take who knows the key for the rank that it names; drop any other."""
        if connection not in self._unauthenticated:
            return  # dropped since it was found to have sent something
        messages = connection.receive()
        if not messages and not connection.closed:
            return
        rank = None
        if messages:
            rank = admit(connection, self._key, self._unauthenticated[connection][1], messages[0])
        member = self._members[rank] if rank is not None and 0 <= rank < len(self._members) else None
        if member is None or member.connection is not None:
            self._refused += member is None and bool(messages)
            self._drop(connection)
            return
        del self._unauthenticated[connection]
        connection.max_bytes = MAX_BYTES
        member.connection, member.heard_at = connection, monotonic()
        self._selector.modify(connection, selectors.EVENT_READ, lambda events: self._serve_member(member, events))
        if self._fault is not None:
            connection.send({"fault": asdict(self._fault)})
        if self._stops:
            connection.send({"stop": self._stops})
        if left := [each.rank for each in self._members if each.left]:
            connection.send({"left": left})
        for message in messages[1:]:
            self._handle(member, message)
        if all(member.connection is not None for member in self._members):
            self._selector.unregister(self._server)
            self._server.close()
            for stranger in list(self._unauthenticated):
                self._drop(stranger)

    def _serve_member(self, member: _Member, events: int) -> None:
        connection = member.connection
        assert connection is not None
        if events & selectors.EVENT_WRITE:
            connection.flush()
            self._select_unsent(member, connection)
        if events & selectors.EVENT_READ:
            for message in connection.receive():
                self._handle(member, message)
            if connection.closed:
                self._selector.unregister(connection)
                connection.close()
                self._gone.append(member)
                self._await_no_more(member)
                self._answer(self._relay.leave(member.rank))

    def _await_no_more(self, member: _Member) -> None:
        if self._awaited is not None:
            self._awaited.discard(member.rank)

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        member.heard_at = monotonic()
        if not message:
            return  # a heartbeat
        self._states_wanted |= "ask" in message
        if "state" in message:
            member.state = message["state"]
            self._await_no_more(member)
        if "give" in message:
            self._answer(self._relay.give(member.rank, message))
        if "late" in message:
            self._answer(self._relay.late(member.rank, message["late"]))
        member.heard = member.heard or "heard" in message
        if "left" in message:
            member.left = True
            self._left.append(member.rank)
            self._await_no_more(member)
            self._answer(self._relay.leave(member.rank))
        if "fault" in message:
            self._claims.append(Fault.from_message(message["fault"]))
        if "give up" in message:
            self._broadcast(message)
        if message.get("stop", {}).keys() - self._stops.keys():
            self._stops = message["stop"] | self._stops
            self._broadcast({"stop": self._stops})

    def _find_failure(self, now: float, *, ending: bool) -> None:
        """Declare the ranks that are gone, silent or absent, all of a kind in one fault; else what a rank claims.

        Claims come last: when many connections have something, that of the rank which lost another may be read before
        the end of the lost one's. No rank is gone when rank 0 has left: the others hang up when they hear it, and this
        thread is about to end.
        """
        claims, self._claims[:] = self._claims[:], []
        closed, self._gone = self._gone, []
        if self._fault is not None:
            return
        there = {} if ending or self._members[0].left else \
            {member.rank: member for member in self._members if not member.left}
        said = {rank for fault in claims if fault.reported for rank in fault.ranks}
        if gone := sorted(member.rank for member in closed if member.rank in there.keys() - said):
            self._declare(Fault.ended(*gone))
            return
        if claims:
            self._declare(claims[0])
            return
        silence = {rank: now - member.heard_at for rank, member in there.items() if member.connection is not None}
        longest = max(silence.values(), default=0.0)
        if longest > self.timing.silent_s:
            at_once = longest - 3 * self.timing.beat_s
            self._declare(Fault.silent(longest, *(rank for rank, seconds in silence.items() if seconds > at_once)))
        elif absent := [rank for rank, member in there.items()
                        if member.connection is None and now - member.heard_at > self.timing.join_s]:
            self._declare(Fault.absent(self.timing.join_s, self._refused, *absent))

    def _declare(self, fault: Fault) -> None:
        if self._fault is None:
            self._fault = fault
            self._broadcast({"fault": asdict(fault)})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        self._answer((member.rank, message) for member in self._members)

    def _answer(self, answers: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        latest, code = None, b""
        for rank, message in answers:
            connection = self._members[rank].connection
            if connection is not None and not connection.closed:
                if message is not latest:  # one for all ranks is encoded once
                    latest, code = message, encoded(message)
                connection.send(code)
                self._select_unsent(self._members[rank], connection)

    def _select_unsent(self, member: _Member, connection: Connection) -> None:
        """Wait, too, until the network takes more of what it did not take at once."""
        if connection.has_unsent != member.unsent:
            member.unsent = connection.has_unsent
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.unsent else 0)
            self._selector.modify(connection, events, self._selector.get_key(connection).data)
