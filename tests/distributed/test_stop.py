"""Leaving off in good order, asked by any rank."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from watched_ranks import Ranks, hello, until

from vpipe.distributed.watchdog import watch as current


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(current, "watchdog", None)
    monkeypatch.setattr(current, "_stops", {})
    yield
    current.forget_stop()


def test_the_first_reason_counts_where_there_is_one_process() -> None:
    assert current.stop_asked is None
    current.ask_stop("SIGTERM")
    current.ask_stop("SIGINT")
    assert current.stop_asked == "SIGTERM"
    current.forget_stop()
    assert current.stop_asked is None


def test_all_ranks_hear_of_it_and_those_that_come_later(ranks: Ranks) -> None:
    detector = ranks.start(3, without=(2,))
    ranks.watches[1].ask_stop("SIGUSR1")
    assert ranks.watches[1].stops == {"": "SIGUSR1"}  # at once, whatever the detector does
    until(lambda: ranks.watches[0].stops == {"": "SIGUSR1"})
    ranks.watches[0].ask_stop("asked", "pipeline 1")
    ranks.watches[0].ask_stop("asked", "pipeline 0")
    expected = {"": "SIGUSR1", "pipeline 1": "asked", "pipeline 0": "asked"}
    until(lambda: ranks.watches[1].stops == expected)
    line = hello(detector, 2)
    heard: list[object] = []
    until(lambda: heard.extend(line.receive()) or {"stop": expected} in heard)
    assert all(rank.empty() for rank in ranks.ended.values())
    line.close()


def test_a_stop_requested_while_joining_is_told_after_joining(ranks: Ranks) -> None:
    ranks.start(2)
    current.ask_stop("SIGTERM")
    current.begin(ranks.watches[1])
    until(lambda: ranks.watches[0].stops == {"": "SIGTERM"})


def test_a_signal_handler_may_ask_whatever_it_interrupts(ranks: Ranks) -> None:
    ranks.start(2)
    current.begin(ranks.watches[0])
    before = signal.signal(signal.SIGUSR1, lambda number, frame: current.ask_stop("SIGUSR1"))
    try:
        assert threading.current_thread() is threading.main_thread()
        with ranks.lines[0]._lock:  # the main thread may be saying something
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: current.stop_asked == "SIGUSR1")
        until(lambda: ranks.watches[1].stops == {"": "SIGUSR1"})
    finally:
        signal.signal(signal.SIGUSR1, before)
