"""Ports, addresses and interfaces, found and refused."""

from __future__ import annotations

import re
import socket
import sys

import pytest

from vpipe.distributed import network
from vpipe.distributed.network import (
    address_of,
    check_interfaces,
    free_port,
    held,
    interface_towards,
    is_this_host,
    listening,
    meeting_address,
    reach,
    source_towards,
)
from vpipe.errors import UserError


def test_a_free_port_and_one_in_use() -> None:
    port = free_port(None)
    assert free_port(port) == port
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        with pytest.raises(UserError, match=f"port {port} cannot be used: Address already in use"):
            free_port(port)


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux has it")
def test_a_held_port_is_given_to_nobody_but_the_store() -> None:
    port = free_port(None)
    with held(port):
        with pytest.raises(OSError, match="Address already in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))  # as one who does not reuse addresses
        with listening(port):
            reach("127.0.0.1", port, 5)
    with pytest.raises(UserError, match=f"cannot reach 127.0.0.1 port {port}, where the ranks meet: Connection ref"):
        reach("127.0.0.1", port, 5)


def test_this_host() -> None:
    assert is_this_host(socket.gethostname())
    assert is_this_host("127.0.0.1")
    assert not is_this_host("198.51.100.7")
    assert not is_this_host("no-such-host.invalid")


def test_the_interface_of_a_route() -> None:
    if sys.platform == "linux":
        assert interface_towards("127.0.0.1") == interface_towards("127.0.1.1") == "lo"
    assert source_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"no route to no-such-host\.invalid, where the ranks meet\nhint: set "
                                        r"parallel\.interface"):
        interface_towards("no-such-host.invalid")


def test_interfaces_that_are_not_there() -> None:
    names = [name for _, name in socket.if_nameindex()]
    check_interfaces(",".join(names))
    with pytest.raises(UserError, match=re.escape(f"no network interface 'eth77' on this host, only {names[0]}")
                       + r".*\nhint: set parallel\.interface"):
        check_interfaces(f"{names[0]},eth77")


def test_a_system_that_does_not_tell_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interface_towards("127.0.0.1") is None


def test_an_address_that_no_interface_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "source_towards", lambda address: "203.0.113.9")
    with pytest.raises(UserError, match=re.escape("no network interface has the address 203.0.113.9, from which "
                                                  "127.0.0.1 is reached\nhint: set parallel.interface")):
        interface_towards("127.0.0.1")


def test_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host's own address, unless its name means "this host" to everyone; then the one on the route."""
    known = {"hostA": "10.1.0.1", "debian": "127.0.1.1", "hostB": "10.1.0.2"}
    monkeypatch.setattr(network, "address_of", known.get)
    monkeypatch.setattr(network, "source_towards", {"10.1.0.2": "10.1.0.7"}.get)
    assert meeting_address("hostA", ["hostB"]) == "10.1.0.1"
    assert meeting_address("debian", ["hostB"]) == "10.1.0.7"
    assert meeting_address("unknown", ["hostB"]) == "10.1.0.7"
    with pytest.raises(UserError, match=r"the name 'alias' has no address here\nhint: set parallel\.master_address"):
        meeting_address("debian", ["alias"])
    known["far"] = "10.9.9.9"
    with pytest.raises(UserError, match=re.escape("would reach it: no route to 10.9.9.9")):
        meeting_address("debian", ["far"])
    assert address_of("no-such-host.invalid") is None
