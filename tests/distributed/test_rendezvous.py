"""Ranks that meet in a store, as threads: what they exchange, and what becomes of one that does not come."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore

from vpipe.distributed import rendezvous as module
from vpipe.distributed.failure_detector import WatchdogTiming
from vpipe.distributed.network import free_port
from vpipe.distributed.rendezvous import Rendezvous, open_store
from vpipe.errors import RunError

TIMING = WatchdogTiming(beat_s=0.05, silent_s=20.0, grace_s=5.0, long_s=60.0, join_s=20.0)


@pytest.fixture(autouse=True)
def not_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are threads: none is the process's."""
    monkeypatch.setattr(module, "install", lambda watchdog: None)


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
    found = Rendezvous(store, rank, ranks, timing, "127.0.0.1")
    ends.append(found.leave)
    return found


def test_every_rank_learns_what_each_one_knows(ends: list[Callable[[], None]]) -> None:
    port = free_port(None)
    first = met(ends, 0, opened(0, port))
    second = met(ends, 1, opened(1, port))
    found: list[Any] = []
    other = Thread(target=lambda: found.append([second.exchange("a", {"x": 1}), second.exchange("b", None)]))
    other.start()
    mine = [first.exchange("a", [2]), first.exchange("b", "c")]
    other.join(30)
    assert found == [mine] == [[[[2], {"x": 1}], ["c", None]]]


def test_a_rank_that_never_comes_is_named(ends: list[Callable[[], None]]) -> None:
    timing = WatchdogTiming(0.05, 20.0, 5.0, 60.0, join_s=0.3)
    first = met(ends, 0, opened(0, free_port(None)), timing=timing)
    with pytest.raises(RunError, match=re.escape("rank 1 did not join within 0.3 s; rank 0 was waiting for all ranks")):
        first.exchange("a", None)


def test_a_rank_that_ends_before_it_takes_part_is_named(ends: list[Callable[[], None]]) -> None:
    port = free_port(None)
    first = met(ends, 0, opened(0, port))
    Rendezvous(opened(1, port), 1, 2, TIMING, "127.0.0.1").leave()
    with pytest.raises(RunError, match="rank 1 has ended its program; rank 0 was waiting for all ranks"):
        first.exchange("a", None)


def test_the_port_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(None)
    monkeypatch.setenv("VPIPE_RUN", "17.0")
    store = opened(0, port)
    monkeypatch.setenv("VPIPE_RUN", "18.0")
    with pytest.raises(RunError, match=re.escape(f"127.0.0.1 port {port} belongs to another run (17.0), not to this "
                                                 "one (18.0) (rank 1)\nhint: give each run a port of its own")):
        opened(1, port)
    del store
