"""Find where the ranks of a run meet: a free port of the first host, and the interface that leads there."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from vpipe.distributed import Host
from vpipe.errors import UserError


def free_port(wanted: int | None) -> int:
    """Return the port where ranks meet: the one ``wanted``, or a free one. Raises UserError if it is in use."""
    with held(wanted or 0) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def listening(port: int) -> Iterator[None]:
    """Let other hosts try whether they reach ``port``.

    Who connects is let go at once: a queue of connections that strangers hold would let no other host in.
    """
    over = Event()

    def let_go(listener: socket.socket) -> None:
        while not over.is_set():
            with suppress(OSError):  # of no connection until now, or of one that is gone
                listener.accept()[0].close()

    with held(port) as bound:
        bound.settimeout(0.1)
        bound.listen(64)
        thread = Thread(target=let_go, args=(bound,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def held(port: int) -> socket.socket:
    """Keep ``port`` from programs that ask for any free one, while the first rank may still listen on it.

    Linux lets a socket listen on a port to which another is bound that does not listen, when both reuse addresses.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: a port in TIME_WAIT will do
    try:
        bound.bind(("", port))  # on all interfaces, where the store listens
    except OSError as error:
        bound.close()
        raise UserError(f"port {port} cannot be used: {error.strerror}",
                        hint="set parallel.master_port to a free port, or leave it out to have one found") from None
    return bound


def check_reachable(address: str, port: int, timeout_s: float) -> None:
    """Try a connection to the port of another host. Raises UserError if there is none."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        raise UserError(f"cannot reach {address} port {port}, where the ranks meet: "
                        f"{error.strerror or 'timed out'}",
                        hint="let the firewalls pass it, or set parallel.master_address and parallel.master_port") \
            from None


def interface_towards(address: str) -> str | None:
    """Return the name of the interface on the route to an address, such as ``eth0``; ``lo`` for one of this host's own.

    None outside of Linux: then gloo and nccl choose.

    Raises:
        UserError: there is no route, or no interface has that route's source address first.
    """
    hint = "set parallel.interface to the network interface between the hosts, such as eth0"
    source = Host(address).source
    if sys.platform != "linux":
        return None
    if source is None:
        raise UserError(f"there is no route to {address}, where the ranks meet", hint=hint)
    for _, name in socket.if_nameindex():
        if _first_address(name) == source:
            return name
    if source.startswith("127."):
        return "lo"  # all of 127.0.0.0/8, of which the interface shows one
    raise UserError(f"no network interface has the address {source}, from which {address} is reached", hint=hint)


def _first_address(interface: str) -> str | None:
    import fcntl

    asks_for_address = 0x8915  # SIOCGIFADDR, netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, asks_for_address, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(found[20:24])
