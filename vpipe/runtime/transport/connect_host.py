"""Connect the ranks of a host by sockets through which they share memory.

The sockets have no names in any file system: the listener of a rank has an abstract address, and is closed once all
are connected. A rank tells its peers the address and a token, and accepts who knows the token and is of its own user.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from vpipe.runtime.transport.link import SharedMemoryLink
from vpipe.runtime.transport.shared_buffers import memory_error
from vpipe.runtime.transport.shared_memory import HostLinks

_OFFER = struct.Struct("<BB16s16s16s")
"""Of a rank: a state, an errno, its boot of the system, the address of its listener, and a token."""

_HELLO = struct.Struct("<I16s")
_UNWANTED, _OFFERED, _UNAVAILABLE, _NO_MEMORY = range(4)

_CREDENTIALS = struct.Struct("3i")


def is_available() -> bool:
    """Return whether this system has what is needed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(select, "epoll")


def connect(rank: int, wanted: bool, made: HostLinks | None, hosts: Sequence[str] | None,
            exchange: Callable[[bytes], list[bytes]]) -> tuple[HostLinks | None, str | None]:
    """Return the links with the ranks of this host if all ranks want some; and why not, where that is to be told. All
    ranks must call it.

    Args:
        made: the links of an earlier call.
        hosts: the name of each rank's host, if known.
        exchange: gives all ranks some bytes, and returns those of all.
    """
    state, error = (_UNAVAILABLE, 0) if not is_available() else (_OFFERED, 0)
    if not wanted or (made is not None and made.full):
        state = _UNWANTED
    elif state == _OFFERED and made is None and (error := memory_error()):
        state = _NO_MEMORY
    name, token = secrets.token_bytes(16), secrets.token_bytes(16)
    listener: socket.socket | None = None
    if state == _OFFERED and made is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_address(name))
        listener.listen(1024)
    offers = [_OFFER.unpack(row) for row in exchange(_OFFER.pack(state, error, _boot(), name, token))]
    connected: dict[int, socket.socket] = {}
    try:
        refusal = _refusal(offers)
        if refusal is not None or listener is None:
            return (None, refusal or None) if refusal is not None else (made, None)
        boot = offers[rank][2]
        near = [peer for peer, offer in enumerate(offers) if peer != rank and offer[2] == boot]
        for peer in (peer for peer in near if peer > rank):
            _, _, _, their_name, their_token = offers[peer]
            if (reached := _reach(their_name, _HELLO.pack(rank, their_token))) is not None:
                connected[peer] = reached
        reach = exchange(_flags(connected, len(offers)))
        coming = {peer for peer in near if peer < rank and reach[peer][rank]}
        connected |= _accept_all(listener, coming, token)
        agreed = exchange(_flags(connected, len(offers)))
        links = {peer: SharedMemoryLink(peer, connected.pop(peer)) for peer in sorted(connected) if agreed[peer][rank]}
        apart = [(a, b) for b in range(len(offers)) for a in range(b) if offers[a][2] == offers[b][2]
                 and (hosts is None or hosts[a] == hosts[b]) and not (agreed[a][b] and agreed[b][a])]
        why = f"ranks {apart[0][0]} and {apart[0][1]} have no sockets in common: they are in different containers or " \
              "belong to different users" if apart else None
        return HostLinks(links, len(links) == len(offers) - 1, rank < min(links, default=0)), why
    finally:
        if listener is not None:
            listener.close()
        for left in connected.values():
            left.close()


def _refusal(offers: Sequence[tuple[int, int, bytes, bytes, bytes]]) -> str | None:
    """Return why there are no links; empty where nobody asks."""
    first = next(((rank, state, error) for rank, (state, error, *_) in enumerate(offers) if state != _OFFERED), None)
    if first is None:
        return None
    rank, state, error = first
    if state == _NO_MEMORY:
        return f"rank {rank} got none: {os.strerror(error)}"
    if state == _UNAVAILABLE:
        return f"the system of rank {rank} has none without a name (Linux has)"
    return f"rank {rank} is set to shared_memory false" if any(offer[0] == _OFFERED for offer in offers) else ""


def _reach(name: bytes, hello: bytes) -> socket.socket | None:
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


def _flags(ranks: Collection[int], count: int) -> bytes:
    return bytes(rank in ranks for rank in range(count))


def _address(name: bytes) -> bytes:
    return b"\0vpipe-" + name.hex().encode()


def _boot() -> bytes:
    """Return 16 bytes that tell this boot of this host from others; of a system that does not say, any."""
    with suppress(OSError, ValueError), open("/proc/sys/kernel/random/boot_id") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))
    return secrets.token_bytes(16)
