"""Ports, addresses and interfaces, found and refused."""

from __future__ import annotations

import re
import socket
import sys
from contextlib import ExitStack

import pytest

from vpipe.app.launch.network import check_reachable, free_port, held, interface_towards, listening
from vpipe.distributed import Host
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
            check_reachable("127.0.0.1", port, 5)
    with pytest.raises(UserError, match=f"cannot reach 127.0.0.1 port {port}, where the ranks meet: Connection ref"):
        check_reachable("127.0.0.1", port, 5)


def test_strangers_keep_nobody_from_a_port_that_is_tried() -> None:
    port = free_port(None)
    with listening(port), ExitStack() as held_open:
        for _ in range(150):  # more than wait for a listener at once
            held_open.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        check_reachable("127.0.0.1", port, 5)


def test_this_host() -> None:
    assert Host(socket.gethostname()).is_this
    assert Host("127.0.0.1").is_this
    assert not Host("198.51.100.7").is_this
    assert not Host("no-such-host.invalid").is_this


def test_the_interface_of_a_route() -> None:
    if sys.platform == "linux":
        assert interface_towards("127.0.0.1") == interface_towards("127.0.1.1") == "lo"
    assert Host("127.0.0.1").source == "127.0.0.1"
    with pytest.raises(UserError, match=r"no route to no-such-host\.invalid, where the ranks meet\nhint: set "
                                        r"parallel\.interface"):
        interface_towards("no-such-host.invalid")


def test_interfaces_that_are_not_there() -> None:
    names = [name for _, name in socket.if_nameindex()]
    Host.check_interfaces(",".join(names))
    with pytest.raises(UserError, match=re.escape(f"no network interface 'eth77' on this host, only {names[0]}")
                       + r".*\nhint: set parallel\.interface"):
        Host.check_interfaces(f"{names[0]},eth77")


def test_a_system_that_does_not_tell_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interface_towards("127.0.0.1") is None


def test_an_address_that_no_interface_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "source", "203.0.113.9")
    with pytest.raises(UserError, match=re.escape("no network interface has the address 203.0.113.9, from which "
                                                  "127.0.0.1 is reached\nhint: set parallel.interface")):
        interface_towards("127.0.0.1")


def test_ranks_meet_at_an_address_of_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host's own address, unless its name means "this host" to everyone; then the one on the route."""
    known = {"hostA": "10.1.0.1", "debian": "127.0.1.1", "hostB": "10.1.0.2"}
    monkeypatch.setattr(Host, "address", property(lambda host: known.get(host.name)))
    monkeypatch.setattr(Host, "source", property(lambda host: "10.1.0.7" if host.name == "hostB" else None))
    assert Host("hostA").address_for(["hostB"]) == "10.1.0.1"
    assert Host("debian").address_for(["hostB"]) == "10.1.0.7"
    assert Host("unknown").address_for(["hostB"]) == "10.1.0.7"
    with pytest.raises(UserError, match=r"the name 'alias' has no address here\nhint: set parallel\.master_address"):
        Host("debian").address_for(["alias"])
    known["far"] = "10.9.9.9"
    with pytest.raises(UserError, match=re.escape("would reach it: no route to 10.9.9.9")):
        Host("debian").address_for(["far"])
    monkeypatch.undo()
    assert Host("no-such-host.invalid").address is None
