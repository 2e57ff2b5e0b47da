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
from typing import Any

from vpipe.runtime.transport.link import SharedMemoryLink
from vpipe.runtime.transport.shared_buffers import memory_error
from vpipe.runtime.transport.shared_memory import HostLinks

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
    why: str | None = None  # there is none here; empty where nobody asks
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
        if refusing := [(one, theirs) for one, (theirs, *_) in enumerate(offers) if theirs is not None]:
            first, why = refusing[0]
            if not why and len(refusing) < len(offers):
                why = f"rank {first} is set to shared_memory false"
            return None, why or None
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
