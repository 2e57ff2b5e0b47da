"""Find where ranks meet: a free port of the first host, its address, and the interface that leads there."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vpipe.errors import UserError

_ANY_PORT = 9
"""For routes: nothing is sent there."""


def free_port(wanted: int | None) -> int:
    """Return the port where ranks meet: the one ``wanted``, or a free one. Raises UserError if it is in use."""
    with _bound(wanted or 0) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def held(port: int) -> Iterator[None]:
    """Keep ``port`` from programs that ask for any free one, while the first rank may still listen on it.

    Linux lets a socket listen on a port to which another is bound that does not listen, when both reuse addresses.
    """
    with _bound(port):
        yield


@contextmanager
def listening(port: int) -> Iterator[None]:
    """Let other hosts try whether they reach ``port``."""
    with _bound(port) as bound:
        bound.listen(64)
        yield


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: a port in TIME_WAIT will do
    try:
        bound.bind(("", port))  # on all interfaces, where the store listens
    except OSError as error:
        bound.close()
        raise UserError(f"port {port} cannot be used: {error.strerror}",
                        hint="set parallel.master_port to a free port, or leave it out to have one found") from None
    return bound


def reach(address: str, port: int, timeout_s: float) -> None:
    """Try a connection to the port of another host. Raises UserError if there is none."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        raise UserError(f"cannot reach {address} port {port}, where the ranks meet: "
                        f"{error.strerror or 'timed out'}",
                        hint="let the firewalls pass it, or set parallel.master_address and parallel.master_port") \
            from None


def is_this_host(name: str) -> bool:
    """Return whether a host's name or address is one of this host's."""
    if name == socket.gethostname():
        return True
    address = address_of(name)
    if address is None:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind((address, 0))  # the kernel knows its own addresses
        return True
    return False


def address_of(name: str) -> str | None:
    """Return the IPv4 address of a host; None when no one knows the name."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def source_towards_name(name: str) -> str | None:
    """Return :func:`source_towards` of a host's name."""
    address = address_of(name)
    return None if address is None else source_towards(address)


def source_towards(address: str) -> str | None:
    """Return the address of this host on the route to another; None when there is no route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def meeting_address(first: str, others: list[str]) -> str:
    """Return the address of this host, called ``first``, at which ``others`` find it.

    The address that its name stands for, unless that is a loopback one, which means this host to everyone; then the
    one on the route to the first of the others.

    Raises:
        UserError: none is found.
    """
    named = address_of(first)
    if named is not None and not named.startswith("127."):
        return named
    far, source = address_of(others[0]), source_towards_name(others[0])
    if source is None or source.startswith("127."):
        raise UserError(f"no address of this host is found at which {others[0]} would reach it: "
                        + (f"the name '{others[0]}' has no address here" if far is None else f"no route to {far}"),
                        hint="set parallel.master_address to this host's address in their common network")
    return source


def check_interfaces(names: str) -> None:
    """Refuse interfaces, separated by commas as for gloo, that this host does not have."""
    there = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name not in there:
            raise UserError(f"there is no network interface '{name}' on this host, only {', '.join(there)}",
                            hint="set parallel.interface, or GLOO_SOCKET_IFNAME where that is set, to the one between "
                            "the hosts, or leave it out to have it found")


def interface_towards(address: str) -> str | None:
    """Return the name of the interface on the route to an address, such as ``eth0``; ``lo`` for one of this host's own.

    None outside of Linux: then gloo and nccl choose.

    Raises:
        UserError: there is no route, or no interface has that route's source address first.
    """
    hint = "set parallel.interface to the network interface between the hosts, such as eth0"
    source = source_towards_name(address)
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
