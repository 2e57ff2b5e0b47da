"""Pass tensors between the ranks of one host through shared memory.

A send does not wait: it is buffered. But of activations only so many are sent as the receiver has posted receives for,
and a few more, so that in an evaluation the first stage does not fill the memory. A receive is posted as of the call,
but its sender learns of it with the next message, or before this rank waits.

The sockets by which the ranks share memory have no names in any file system: the listener of a rank has an abstract
address, and is closed once all are connected. A rank tells its peers the address and a token, and accepts who knows the
token and is of its own user.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from vpipe.errors import RunError
from vpipe.extras.shared_memory.link import (
    FULL,
    NO_GENERATION,
    NO_KEY,
    Arrival,
    LinkClosedError,
    ReceivedMessage,
    SharedMemoryLink,
)
from vpipe.extras.shared_memory.shared_buffers import memory_error
from vpipe.runtime import transport

TensorSpec = transport.TensorSpec
TransferKey = transport.TransferKey
TransferKind = transport.TransferKind


class HostLinks:
    """The links of this rank with the other ranks of its host, which the pipelines of a process share.

    Args:
        reports: whether this rank says when the memory is full.

    Attributes:
        links: by rank.
        complete: whether all other ranks are linked.
        full: whether a rank has found the memory full: then no rank of the host sends through it any more.
    """

    def __init__(self, links: Mapping[int, SharedMemoryLink], complete: bool, reports: bool) -> None:
        self.links, self.complete, self._reports, self.full = links, complete, reports, False
        self._poll = select.epoll()
        self._of = {link.fileno(): link for link in links.values()}
        for descriptor in self._of:
            self._poll.register(descriptor, select.EPOLLIN)
        self._writing: set[int] = set()
        self._generations: WeakValueDictionary[int, SharedMemoryTransfers] = WeakValueDictionary()
        self._newest = -1
        self._early: dict[int, list[tuple[int, ReceivedMessage]]] = {}

    def register(self, generation: int, transfers: SharedMemoryTransfers) -> None:
        """Give all messages of a generation to its transfers."""
        self._generations[generation], self._newest = transfers, generation
        for peer, message in self._early.pop(generation, ()):
            transfers.deliver(peer, message)

    def receive(self, timeout_s: float) -> None:
        """Receive a message of each link that has one, or wait until one has one; send what could not be sent."""
        for link in self.links.values():
            if bool(link.unsent) != (link.fileno() in self._writing) and not link.closed:
                self._writing ^= {link.fileno()}
                self._poll.modify(link, select.EPOLLIN | (select.EPOLLOUT if link.unsent else 0))
        for descriptor, event in self._poll.poll(timeout_s):
            link = self._of[descriptor]
            if event & select.EPOLLOUT:
                with suppress(LinkClosedError):
                    link.flush()
            if event & ~select.EPOLLOUT:
                message = link.receive()
                if link.closed:
                    self._poll.unregister(descriptor)
                elif message is not None:
                    self._deliver(link.peer, message)

    def _deliver(self, peer: int, message: ReceivedMessage) -> None:
        if message.what == FULL:
            self.give_up(message.accepted)
        elif message.generation != NO_GENERATION:
            transfers = self._generations.get(message.generation)
            if transfers is not None:
                transfers.deliver(peer, message)
            elif message.generation > self._newest:  # else of a pipeline that was abandoned here
                self._early.setdefault(message.generation, []).append((peer, message))

    def give_up(self, error: int) -> None:
        """Send nothing through shared memory from now on, and tell all; the first rank of the host says so."""
        if not self.full and self._reports:
            print("gloo carries tensors between ranks of a host from now on: there is no more shared memory "
                  f"({os.strerror(error)})", file=sys.stderr, flush=True)
        self.full = True
        for link in self.links.values():
            if not link.full_here:
                link.tell_full(error)

    def break_off(self) -> None:
        """Shut all links down, from any thread: one that waits for them sees their end."""
        for link in self.links.values():
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors."""
        self._poll.close()
        for link in self.links.values():
            link.close()


class SharedMemoryTransfers:
    """The transfers of one pipeline over the links of this rank.

    Args:
        most_unaccepted: activations that may be under way to a rank that has not posted their receives.
        timeout_s: of a wait.

    Attributes:
        posted: specs of the receives that are not taken yet, by rank and key.
        arrived: what has come, and is not taken yet.
    """

    def __init__(self, links: HostLinks, generation: int, most_unaccepted: int, timeout_s: float) -> None:
        self.links = links
        self._generation, self._most, self._timeout_s = generation, most_unaccepted, timeout_s
        self.posted: dict[tuple[int, TransferKey], Sequence[TensorSpec]] = {}
        self.arrived: dict[tuple[int, TransferKey], deque[Arrival]] = {}
        # Activations, by peer: sent, and accepted there; accepted here, and as many as the peer was told.
        self._latest: dict[int, TransferKey] = {}
        self._sent, self._taken = dict.fromkeys(links.links, 0), dict.fromkeys(links.links, 0)
        self._accepted, self._acknowledged = dict.fromkeys(links.links, 0), dict.fromkeys(links.links, 0)
        links.register(generation, self)

    def is_crowded(self, peer: int) -> bool:
        """Return whether activations for a rank must wait for it to post receives."""
        return (self._sent[peer] - self._taken[peer] >= self._most and self.links.complete
                and not self.links.full)

    def send(self, peer: int, key: TransferKey, tensors: Sequence[Tensor]) -> None:
        """Send tensors. Raises as :meth:`SharedMemoryLink.send`."""
        self.links.links[peer].send(key, self._generation, self._accepted[peer], tensors)
        self._acknowledged[peer] = self._accepted[peer]
        if key.kind == TransferKind.ACTIVATIONS:
            self._sent[peer] += 1
        self._latest[peer] = key

    def post(self, peer: int, key: TransferKey, specs: Sequence[TensorSpec]) -> None:
        """Post a receive."""
        self.posted[peer, key] = specs
        if key.kind == TransferKind.ACTIVATIONS and (peer, key) in self.arrived:
            self._accept(peer)

    def wait_for(self, peer: int, key: TransferKey) -> bool:
        """Wait for a transfer; return False if it comes another way. Raises as :meth:`wait`."""
        link = self.links.links[peer]
        self.wait(peer, lambda: (peer, key) in self.arrived or link.full_there)
        return (peer, key) in self.arrived

    def take(self, peer: int, key: TransferKey) -> list[Tensor]:
        """Return the tensors of a posted transfer that has arrived."""
        specs, arrivals = self.posted.pop((peer, key)), self.arrived[peer, key]
        arrival = arrivals.popleft()
        if not arrivals:
            del self.arrived[peer, key]
        sent = arrival.layout.specs
        if len(specs) != len(sent) or any(mine.shape != its.shape or mine.dtype is not its.dtype
                                          for mine, its in zip(specs, sent, strict=True)):
            raise RunError(f"{key} from rank {peer} are {', '.join(map(str, sent))}, not {', '.join(map(str, specs))}",
                           hint="this is a defect of the schedule or of vpipe: please report it")
        return arrival.tensors(specs)

    def deliver(self, peer: int, message: ReceivedMessage) -> None:
        """Keep what has arrived until it is taken."""
        self._taken[peer] = max(self._taken[peer], message.accepted)
        if message.arrival is not None:
            slot = peer, message.key
            if slot in self.arrived:
                self.arrived[slot].append(message.arrival)
                return
            self.arrived[slot] = deque([message.arrival])
            if message.key.kind == TransferKind.ACTIVATIONS and slot in self.posted:
                self._accept(peer)

    def _accept(self, peer: int) -> None:
        self._accepted[peer] += 1
        if self._accepted[peer] - self._acknowledged[peer] > self._most // 2:
            self._acknowledge(peer)

    def _acknowledge(self, peer: int) -> None:
        with suppress(LinkClosedError):
            self.links.links[peer].acknowledge(self._generation, self._accepted[peer])
        self._acknowledged[peer] = self._accepted[peer]

    def wait(self, peer: int, until: Callable[[], bool]) -> None:
        """Wait for something that comes from a rank.

        Raises:
            LinkClosedError: that rank is gone.
            RuntimeError: the time is over.
        """
        self.links.receive(0.0)
        link, deadline = self.links.links[peer], monotonic() + self._timeout_s
        while not until():
            if link.closed:
                raise LinkClosedError("Connection closed by peer")
            for other, each in self.links.links.items():
                if each.returned or self._accepted[other] != self._acknowledged[other]:
                    self._acknowledge(other)
            left = deadline - monotonic()
            if left <= 0:
                raise RuntimeError(f"Timed out waiting {1000 * self._timeout_s:.0f}ms for rank {peer}")
            self.links.receive(left)

    def unfinished(self) -> Iterator[tuple[int, TransferKey, Callable[[], bool]]]:
        """Yield the ranks that have not accepted all activations, or were not sent all messages, with the latest
        transfer and what tells when it is done; and tell every rank what was accepted here."""
        for peer, link in self.links.links.items():
            if not link.closed and self._accepted[peer] != self._acknowledged[peer]:
                self._acknowledge(peer)
        for peer, link in self.links.links.items():
            def is_done(peer: int = peer, link: SharedMemoryLink = link) -> bool:
                return not link.unsent and self._sent[peer] <= self._taken[peer]

            if not is_done():
                yield peer, self._latest.get(peer, NO_KEY), is_done


# -- the links ---------------------------------------------------------------------------------------------------

_HELLO = struct.Struct("<I16s")

_CREDENTIALS = struct.Struct("3i")


def is_available() -> bool:
    """Return whether this system has what is needed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(select, "epoll")


def connect(rank: int, wanted: bool, made: HostLinks | None, hosts: Sequence[str] | None,
            all_gather: Callable[[Any], list[Any]]) -> tuple[HostLinks | None, str | None]:
    """Return the links with the ranks of this host if all ranks want some; and why not, where that is to be told. All
    ranks must call it.

    Args:
        made: the links of an earlier call.
        hosts: the name of each rank's host, if known.
        all_gather: gives all ranks what JSON holds, and returns those of all.
    """
    why: str | None = None  # there is none here; empty where nothing is to be told
    if not wanted or (made is not None and made.full):
        why = ""
    elif not is_available():
        why = f"the system of rank {rank} has none without a name (Linux has)"
    elif made is None and (error := memory_error()):
        why = f"rank {rank} got none: {os.strerror(error)}"
    name, token = secrets.token_hex(16), secrets.token_bytes(16)
    listener: socket.socket | None = None
    if why is None and made is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_address(name))
        listener.listen(1024)
    offers = all_gather([why, _boot(), name, token.hex()])
    boots = [boot for _, boot, _, _ in offers]
    connected: dict[int, socket.socket] = {}
    try:
        if refusing := [theirs for theirs, *_ in offers if theirs is not None]:
            return None, refusing[0] or None
        if listener is None:
            return made, None
        near = [peer for peer, boot in enumerate(boots) if peer != rank and boot == boots[rank]]
        for peer in (peer for peer in near if peer > rank):
            *_, their_name, their_token = offers[peer]
            if (reached := _reach(their_name, _HELLO.pack(rank, bytes.fromhex(their_token)))) is not None:
                connected[peer] = reached
        reach = all_gather(list(connected))
        connected |= _accept_all(listener, {peer for peer in near if peer < rank and rank in reach[peer]}, token)
        agreed = all_gather(list(connected))
        links = {peer: SharedMemoryLink(peer, connected.pop(peer))
                 for peer in sorted(connected) if rank in agreed[peer]}
        apart = [(a, b) for b in range(len(offers)) for a in range(b) if boots[a] == boots[b]
                 and (hosts is None or hosts[a] == hosts[b]) and not (b in agreed[a] and a in agreed[b])]
        why = f"ranks {apart[0][0]} and {apart[0][1]} have no sockets in common: they are in different containers or " \
              "belong to different users" if apart else None
        return HostLinks(links, len(links) == len(offers) - 1, rank < min(links, default=0)), why
    finally:
        if listener is not None:
            listener.close()
        for left in connected.values():
            left.close()


def _reach(name: str, hello: bytes) -> socket.socket | None:
    reached = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        reached.settimeout(5.0)
        reached.connect(_address(name))
        if _is_own_user(reached):
            reached.send(hello)
            return reached
    except OSError:
        pass
    reached.close()
    return None


def _accept_all(listener: socket.socket, coming: Collection[int], token: bytes) -> dict[int, socket.socket]:
    """Accept the ranks that have connected; who does not know the token is none."""
    connected: dict[int, socket.socket] = {}
    listener.setblocking(False)
    with suppress(OSError):  # no more
        while len(connected) < len(coming):
            accepted, _ = listener.accept()
            try:
                accepted.setblocking(False)
                peer, theirs = _HELLO.unpack(accepted.recv(_HELLO.size + 1))
                if secrets.compare_digest(theirs, token) and peer in coming and peer not in connected \
                        and _is_own_user(accepted):
                    connected[peer] = accepted
                    continue
            except (OSError, struct.error):
                pass
            accepted.close()
    return connected


def _is_own_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _address(name: str) -> bytes:
    return b"\0vpipe-" + name.encode()


def _boot() -> str:
    """Return what tells this boot of this host from others; of a system that does not say, any."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return secrets.token_hex(16)
