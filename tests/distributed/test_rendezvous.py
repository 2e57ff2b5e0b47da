"""Ranks that meet, as threads: who is let in, and what becomes of one that does not come."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from vpipe.app.launch.network import free_port
from vpipe.distributed import rendezvous as module
from vpipe.distributed.connection import connect
from vpipe.distributed.environment import RankEnvironment
from vpipe.distributed.failure_detector import WatchdogTiming
from vpipe.distributed.rendezvous import Rendezvous, open_store
from vpipe.errors import RunError

TIMING = WatchdogTiming(beat_s=0.05, silent_s=20.0, grace_s=5.0, long_s=60.0, join_s=20.0)


@pytest.fixture(autouse=True)
def not_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are threads: none is the process's."""
    monkeypatch.setattr(module.watch, "begin", lambda watchdog: None)
    monkeypatch.setattr(module, "_taken_from_environment", {})


@pytest.fixture
def ends() -> Iterator[list[Callable[[], None]]]:
    """What is to be ended after the test, all at the same time."""
    found: list[Callable[[], None]] = []
    yield found
    threads = [Thread(target=end) for end in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def opened(rank: int, port: int, ranks: int = 2) -> PrefixStore:
    return open_store("test", "127.0.0.1", port, rank, ranks, 20)


def met(ends: list[Callable[[], None]], rank: int, store: PrefixStore, ranks: int = 2,
        timing: WatchdogTiming = TIMING) -> Rendezvous:
    found = Rendezvous.in_store(rank, ranks, timing, store, "127.0.0.1")
    ends.append(found.leave)
    return found


def meet(ends: list[Callable[[], None]], rank: int, port: int, ranks: int = 2,
         timing: WatchdogTiming = TIMING) -> Rendezvous:
    found = Rendezvous.by_secret(rank, ranks, timing, "127.0.0.1", port)
    ends.append(found.leave)
    return found


def both(first: Rendezvous, second: Rendezvous) -> list[Any]:
    """What each learns from the other."""
    found: list[Any] = []
    other = Thread(target=lambda: found.append(second.exchange.all_gather({"x": 1})))
    other.start()
    mine = first.exchange.all_gather([2])
    other.join(30)
    return [mine, *found]


def test_ranks_meet_in_a_store(ends: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(None)
    first = met(ends, 0, opened(0, port))
    assert both(first, met(ends, 1, opened(1, port))) == [[[2], {"x": 1}]] * 2
    monkeypatch.setenv(RankEnvironment.SECRET, "what only they know")
    store = opened(0, port)
    first = met(ends, 0, store)
    assert store.get("watchdog").split(b" ")[1:] == [b"", b""]  # a store may be read
    assert both(first, met(ends, 1, opened(1, port))) == [[[2], {"x": 1}]] * 2


@pytest.mark.parametrize("folder", [True, False])
def test_ranks_with_a_secret_meet_without_a_store(ends: list[Callable[[], None]], folder: bool, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RankEnvironment.SECRET, "what only they know")
    monkeypatch.setenv(RankEnvironment.MEETING, str(tmp_path) if folder else "")
    for _ in range(2):  # a program may destroy its group, and make another
        port, found = free_port(None), list[Rendezvous]()
        early = Thread(target=lambda port=port, found=found: found.append(meet(ends, 1, port)))  # type: ignore[misc]
        early.start()
        first = meet(ends, 0, port)
        early.join(30)
        assert both(first, *found) == [[[2], {"x": 1}]] * 2
        with pytest.raises(OSError, match="refused"):  # nobody else comes in
            connect(str(tmp_path / "ranks") if folder else "127.0.0.1", port, 5.0)


def test_a_rank_that_never_comes_is_named(ends: list[Callable[[], None]]) -> None:
    timing = WatchdogTiming(0.05, 20.0, 5.0, 60.0, join_s=0.3)
    first = met(ends, 0, opened(0, free_port(None)), timing=timing)
    with pytest.raises(RunError, match=re.escape("rank 1 did not join within 0.3 s; rank 0 was sharing what each has")):
        first.exchange.all_gather(None)


@pytest.mark.parametrize("name", [RankEnvironment.SECRET, RankEnvironment.RUN])  # a job's steps may share a secret
def test_a_rank_with_another_secret_or_run_is_refused_and_counted(name: str, ends: list[Callable[[], None]],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    timing, port = WatchdogTiming(0.05, 20.0, 5.0, 60.0, join_s=1.0), free_port(None)
    monkeypatch.setenv(RankEnvironment.SECRET, "of the job")
    monkeypatch.setenv(name, "mine")
    first = meet(ends, 0, port, timing=timing)
    monkeypatch.setenv(name, "another")
    with pytest.raises(RunError, match=re.escape(f"127.0.0.1 port {port} belongs to another run: it is no rank of this "
                                                 "run (rank 1)\nhint: give each run a port of its own")):
        meet(ends, 1, port)
    with pytest.raises(RunError, match=re.escape("rank 1 did not join within 1 s (refused 1 that did not know this "
                                                 "run's secret); rank 0 was sharing")):
        first.exchange.all_gather(None)


def test_a_rank_that_is_dropped_among_many_strangers_tries_again(ends: list[Callable[[], None]],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RankEnvironment.SECRET, "what only they know")
    port, found = free_port(None), list[Rendezvous]()
    first = meet(ends, 0, port)
    other = Thread(target=lambda: found.append(meet(ends, 1, port)))
    with monkeypatch.context() as crowded:
        crowded.setattr("vpipe.distributed.failure_detector.MAX_UNAUTHENTICATED", -2)  # each is one too many
        other.start()
        other.join(0.5)
        assert not found
    other.join(30)
    assert both(first, *found) == [[[2], {"x": 1}]] * 2


@pytest.mark.parametrize("why", ["it is no rank of this run", "it hung up"])
def test_a_rank_does_not_take_an_impostor_for_rank_0(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RankEnvironment.SECRET, "what only they know")
    monkeypatch.setattr(module, "DROPPED_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        def pretend() -> None:
            with server.accept()[0] as accepted:
                accepted.sendall(b'{"nonce": "1"}\n')
                if why == "it hung up":
                    return
                asked = json.loads(accepted.recv(1000))
                accepted.sendall(json.dumps({"proof": asked["proof"]}).encode() + b"\n")  # what it heard itself

        other = Thread(target=pretend)
        other.start()
        with pytest.raises(RunError, match=f"belongs to another run: {why}"):
            Rendezvous.by_secret(1, 2, TIMING, "127.0.0.1", server.getsockname()[1])
        other.join(30)


@pytest.mark.parametrize("forged", ["", "no port", "99999999 a 127.0.0.2", "\xff 1 127.0.0.1", "x" * 100_000,
                                    "-1  127.0.0.1"])
def test_a_forged_address_ends_in_our_words(forged: str) -> None:
    store = HashStore()
    store.set("watchdog", forged)
    with pytest.raises(RunError, match=r"rank 1 could not reach rank 0 at 127.0.0.\d: (?!.Errno)"):
        Rendezvous.in_store(1, 2, replace(TIMING, join_s=0.5), store, "127.0.0.1")
