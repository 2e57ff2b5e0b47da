"""Find the addresses of hosts, and the way between them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from vpipe.errors import UserError


@dataclass(frozen=True)
class Host:
    """A host, by its name or an address of it."""

    name: str

    @property
    def is_this(self) -> bool:
        """Return whether it is the one that this process runs on."""
        if self.name == socket.gethostname():
            return True
        if (address := self.address) is None:
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.bind((address, 0))  # the kernel knows its own addresses
            return True
        return False

    @property
    def address(self) -> str | None:
        """Return its IPv4 address; None when no one knows the name."""
        try:
            return socket.gethostbyname(self.name)
        except OSError:
            return None

    @property
    def source(self) -> str | None:
        """Return the address of this host on the route to that one; None when there is no route. Sends nothing."""
        if (address := self.address) is None:
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # any port: a route is asked for
            except OSError:
                return None
            return str(probe.getsockname()[0])

    def address_for(self, others: Sequence[str]) -> str:
        """Return the address of this host, by this name, at which others find it.

        The address that its name stands for, unless that is a loopback one, which means this host to everyone; then the
        one on the route to the first of the others.

        Raises:
            UserError: none is found.
        """
        named, far = self.address, Host(others[0])
        if named is not None and not named.startswith("127."):
            return named
        source = far.source
        if source is None or source.startswith("127."):
            raise UserError(f"no address of this host is found at which {far.name} would reach it: "
                            + (f"the name '{far.name}' has no address here" if far.address is None else
                               f"no route to {far.address}"),
                            hint="set parallel.master_address to this host's address in their common network")
        return source

    @staticmethod
    def check_interfaces(names: str) -> None:
        """Refuse network interfaces, separated by commas as for gloo, that this host does not have.

        Raises:
            UserError: it lacks one.
        """
        there = [name for _, name in socket.if_nameindex()]
        for name in names.split(","):
            if name not in there:
                raise UserError(f"there is no network interface '{name}' on this host, only {', '.join(there)}",
                                hint="set parallel.interface, or GLOO_SOCKET_IFNAME where that is set, to the one "
                                "between the hosts, or leave it out to have it found")
