"""Ranks as threads of this process, over real connections, on a fast clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue

from vpipe.distributed.connection import Connection, connect, introduce
from vpipe.distributed.failure_detector import FailureDetector, WatchdogTiming
from vpipe.distributed.watchdog import Watchdog
from vpipe.errors import RunError

WITHIN_S = 20.0
"""What takes milliseconds here; a loaded machine takes longer."""

KEY = "what the ranks know"

PACE = WatchdogTiming(beat_s=0.05, silent_s=1.2, grace_s=0.3, long_s=30.0, join_s=1.2)


@dataclass(frozen=True)
class Waiting:
    peer: int | None
    purpose: str = "for the activations from"
    limit_s: float | None = None

    def __str__(self) -> str:
        return f"waiting for rank {self.peer}"


class Ranks:
    """Some ranks of a job on hosts a, b, c ..., two on each, with what they were ended with."""

    def __init__(self, pace: WatchdogTiming = PACE) -> None:
        self.pace = pace
        self.detector: FailureDetector | None = None
        self.watches: dict[int, Watchdog] = {}
        self.lines: dict[int, Connection] = {}
        self.ended: dict[int, Queue[RunError]] = {}
        self.broken_off: list[int] = []
        self.shown: list[str] = []

    def start(self, ranks: int, without: tuple[int, ...] = ()) -> FailureDetector:
        self.detector = FailureDetector(ranks, self.pace, "127.0.0.1", KEY)
        for rank in range(ranks):
            if rank not in without:
                self.join(rank, ranks, hello(self.detector, rank))
        return self.detector

    def join(self, rank: int, ranks: int, line: Connection) -> Watchdog:
        hosts = ["abc"[other // 2] for other in range(ranks)]
        self.lines[rank], self.ended[rank] = line, Queue()
        self.watches[rank] = Watchdog(rank, hosts, line, self.pace, self.ended[rank].put)
        self.watches[rank].describe = lambda rank: f"rank {rank} (stage {rank})"
        self.watches[rank].note = self.shown.append
        self.watches[rank].break_off = lambda: self.broken_off.append(rank)
        return self.watches[rank]

    def end_of(self, rank: int) -> str:
        return str(self.ended[rank].get(timeout=WITHIN_S))

    def stop(self) -> None:
        for watch in self.watches.values():
            watch.leave()
        if self.detector is not None:
            self.detector.stop()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hello(detector: FailureDetector, rank: int) -> Connection:
    """A rank that says no more than its name."""
    line = connect("127.0.0.1", detector.port, WITHIN_S)
    introduce(line, rank, KEY, WITHIN_S)
    return line
