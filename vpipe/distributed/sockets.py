"""Find the TCP sockets of this process: break off its connections, and keep strangers from its listeners."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

FOLDER = "/proc/self/fd"
"""Where Linux lists the open files of a process, each with what it is."""

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
"""Where Linux lists the TCP sockets of this host's network, each with the user that made it."""

_ESTABLISHED = "01"

_ATTACH_FILTER = 26
"""SO_ATTACH_FILTER of ``asm-generic/socket.h``, see socket(7)."""


_not_for_children: WeakSet[socket.socket] = WeakSet()


def close_in_child(own: socket.socket) -> None:
    """Close a socket in every forked child, which would keep a connection up when this process is gone."""
    _not_for_children.add(own)


def _close_in_child() -> None:
    for own in _not_for_children:
        own.close()


os.register_at_fork(after_in_child=_close_in_child)


class _Program(ctypes.Structure):
    """``struct sock_fprog`` of ``linux/filter.h``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: accept 0 bytes of a packet


def connections(but: Collection[int] = ()) -> dict[int, str]:
    """Return the descriptors of connected TCP sockets, each with the kernel's name for it; none outside of Linux.

    Args:
        but: ports, at either end, of connections that do not count.
    """
    return _tcp_sockets(lambda found: not {found.getsockname()[1], found.getpeername()[1]} & set(but))


def listeners() -> dict[int, str]:
    """Return the descriptors of listening TCP sockets, each with the kernel's name for it; none outside of Linux."""
    return _tcp_sockets(lambda found: found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0)


def _tcp_sockets(wanted: Callable[[socket.socket], bool]) -> dict[int, str]:
    """Return the descriptors of those that are wanted; ``wanted`` may raise OSError for one that is not."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(FOLDER):
            with suppress(OSError):  # closed meanwhile, or no such socket
                kind = os.readlink(f"{FOLDER}/{name}")
                if kind.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6) \
                                and wanted(copy):
                            found[int(name)] = kind
    return found


def _copies(sockets: Mapping[int, str]) -> Iterator[socket.socket]:
    """Yield those that are still what they were, each as a copy that is closed afterwards."""
    for descriptor, kind in sockets.items():
        with suppress(OSError):
            if os.readlink(f"{FOLDER}/{descriptor}") == kind:
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    yield copy


def break_off(sockets: Mapping[int, str]) -> None:
    """Shut down connections that are still what they were: a thread that waits for one of them sees its end."""
    for copy in _copies(sockets):
        with suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)


@contextmanager
def closed_afterwards() -> Iterator[None]:
    """Let the listeners that are made meanwhile take no connection from the end on; outside of Linux do nothing.

    For gloo, whose connections are all made with the group: it listens for ever, and asks nobody for a password. A
    filter drops all packets to the listener; a listener that is closed, or shut down, would make gloo's thread spin.
    What another thread opens meanwhile, some milliseconds, is closed as well.
    """
    before = listeners()
    yield
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("", "0"):  # else it connects when it first sends
        for copy in _copies(dict(listeners().items() - before.items())):
            try:
                copy.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, bytes(_Program(1, ctypes.addressof(_DROP_ALL))))
            except OSError as error:
                print(f"gloo's port {copy.getsockname()[1]} stays open for other users (docs/faults.md): this system "
                      f"lets no filter be set: {error.strerror}", file=sys.stderr, flush=True)


def strangers(descriptors: Iterable[int]) -> list[int]:
    """Return the users, other than this process's, to whose processes on this host these connections lead.

    The other end of a connection from another host is in no table here: it does not count. Neither does a UNIX socket.
    """
    ends: list[tuple[Any, ...]] = []
    for descriptor in descriptors:
        with suppress(OSError, ValueError), socket.socket(fileno=os.dup(descriptor)) as copy:
            ends.append(tuple((_plain(ipaddress.ip_address(name.partition("%")[0])), port)
                              for name, port, *_ in (copy.getpeername(), copy.getsockname())))
    owners: dict[tuple[Any, ...], int] = {}
    for table in _TABLES if ends else ():
        with suppress(OSError), open(table) as file:
            for line in file.readlines()[1:]:
                _, local, remote, state, _, _, _, uid, *_ = line.split()
                if state == _ESTABLISHED:  # one that its process has closed counts as root's
                    owners[_end(local), _end(remote)] = int(uid)
    return sorted({owners.get(pair, os.getuid()) for pair in ends} - {os.getuid()})


def _end(entry: str) -> tuple[str, int]:
    """Return the address and port of ``0100007F:1F90``: words of four bytes in the order of this machine."""
    address, _, port = entry.partition(":")
    words = (int(address[at:at + 8], 16) for at in range(0, len(address), 8))
    return _plain(ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))), int(port, 16)


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return an address as text, one of IPv4 in IPv6's form as the former."""
    return str(getattr(address, "ipv4_mapped", None) or address)
