"""Ranks that exchange values, as threads of this process without any connection."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from threading import Condition
from typing import Any

from vpipe.distributed.value_exchange import Exchange, Relay
from vpipe.errors import RunError

WITHIN_S = 30.0


class Lines:
    """The lines of all ranks, over one relay."""

    def __init__(self, ranks: int) -> None:
        self.relay, self.changed = Relay(ranks), Condition()
        self.inboxes: dict[int, dict[str, Any]] = defaultdict(dict)
        self.of_rank = [ThreadLine(self, rank, ranks) for rank in range(ranks)]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.deliver(self.relay.leave(rank))

    def deliver(self, answers: Any) -> None:
        for listener, message in answers:
            self.inboxes[listener][message["given"]] = message
        self.changed.notify_all()


class ThreadLine:
    """The line of one rank."""

    def __init__(self, lines: Lines, rank: int, ranks: int) -> None:
        self.lines, self.rank, self.ranks = lines, rank, ranks
        self.names = Counter[str]()
        self.call, self.told = "", False

    def next_name(self, channel: str) -> str:
        self.names[channel] += 1
        return f"{channel} {self.names[channel]}"

    def give(self, message: Mapping[str, Any]) -> None:
        with self.lines.changed:
            self.lines.deliver(self.lines.relay.give(self.rank, message))

    def take(self, name: str, doing: str, timeout_s: float | None) -> list[Any]:
        inbox = self.lines.inboxes[self.rank]
        with self.lines.changed:
            assert self.lines.changed.wait_for(lambda: name in inbox, timeout_s or WITHIN_S), f"{name} of {self.rank}"
            message = inbox.pop(name)
        if "without" in message:
            raise RunError(f"rank {message['without']} has ended", hint="see there", rank=self.rank)
        values: list[Any] = message["values"]
        return values


def exchanges(ranks: int) -> list[Exchange]:
    """Return the exchange of each rank."""
    return [Exchange(line) for line in Lines(ranks).of_rank]
