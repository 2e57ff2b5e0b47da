"""The list ``machines``: what is read out of it."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from small_run import write_config

from vpipe.app.config import machines as module
from vpipe.app.config.config import Config, load_config
from vpipe.app.config.machines import Hosts, host_of, parse_machine
from vpipe.app.launch.rank_env import hosts_of, ranks_of
from vpipe.errors import UserError


@pytest.fixture(autouse=True)
def on_host_a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Host, "is_this", property(lambda host: host.name in ("hostA", "10.0.0.1")))


def load(folder: Path, *machines: str, **changes: object) -> Config:
    settings = [f"machines=[{', '.join(machines)}]"] if machines else []
    return load_config(write_config(folder, **changes), settings)


@pytest.mark.parametrize(("text", "login", "gpu", "host"), [
    ("hostB:0", "hostB", 0, "hostB"), ("me@hostB:12", "me@hostB", 12, "hostB"),
    ("10.0.0.2:3", "10.0.0.2", 3, "10.0.0.2"), ("a-b.c_d:0", "a-b.c_d", 0, "a-b.c_d")])
def test_an_entry(text: str, login: str, gpu: int, host: str) -> None:
    assert parse_machine(text) == (login, gpu)
    assert host_of(login) == host


@pytest.mark.parametrize("text", ["hostB", "hostB:", ":0", "hostB:x", "hostB:-1", "-oProxyCommand=x:0", "a b:0",
                                  "me@-x:0", "a;b:0", "$(x):0", "hostB:0\n", "@hostB:0", "hostB:١"])
def test_no_entry(text: str) -> None:
    """Among them all that ssh or a shell would take for more than a name."""
    assert parse_machine(text) is None


def test_ranks_by_host() -> None:
    hosts = Hosts.from_machines(["hostA:1", "me@hostB:0", "10.0.0.1:0", "me@hostB:2", "hostC:0"])
    assert hosts.others == ["me@hostB", "hostC"]
    assert hosts.on(None) == {0: 1, 2: 0}
    assert hosts.on("me@hostB") == {1: 0, 3: 2}
    assert [hosts.name(rank) for rank in range(5)] == ["hostA", "hostB", "hostA", "hostB", "hostC"]
    assert hosts.described(3, "rank 3 (stage 1)") == "rank 3 (stage 1) on hostB"


def test_one_host_is_left_out_of_messages() -> None:
    hosts = Hosts.from_machines(["localhost:0", "127.0.0.1:1"])
    assert hosts.others == []
    assert hosts.described(1, "rank 1 (stage 1)") == "rank 1 (stage 1)"


def test_localhost_has_a_name_among_others() -> None:
    assert Hosts.from_machines(["localhost:0", "hostB:0"]).name(0) == socket.gethostname()


def test_lists_that_do_not_fit(tmp_path: Path) -> None:
    assert hosts_of(load(tmp_path)) is None
    with pytest.raises(UserError, match="machines lists 3, but the schedule has 2 ranks\nhint: give one host:gpu per"):
        hosts_of(load(tmp_path, "hostA:0", "hostB:0", "hostB:1"))
    with pytest.raises(UserError, match=re.escape(f"the first host of machines, 'hostB', is not this one "
                                                  f"('{socket.gethostname()}')\nhint: start vpipe there")):
        hosts_of(load(tmp_path, "hostB:0", "hostA:0"))
    with pytest.raises(UserError, match=r"machines\[1\] is 'hostB' \(--set machines\)\nhint: write host:gpu"):
        load(tmp_path, "hostA:0", "hostB")
    with pytest.raises(UserError, match=r"machines\[2\] is 'me@hostB:1', but another rank of that host is reached as "
                                        r"'hostB' \(--set machines\)\nhint: write one login"):
        load(tmp_path, "hostA:0", "hostB:0", "me@hostB:1")


def test_ranks_are_counted_without_the_data(tmp_path: Path) -> None:
    changes = {"dataset__name": "text", "dataset__path": "/nowhere"}
    assert ranks_of(load(tmp_path, **changes)) == 2
    assert ranks_of(load(tmp_path, **changes, parallel__schedule="interleaved", parallel__model_parallel_size=4)) == 2
