"""Exchange values between the ranks of a job, over the connections that they have with rank 0's failure detector.

Nobody else has such a connection (docs/faults.md, "Who can reach a run"), a dead rank is noticed there first, and any
thread may exchange values while the main thread trains. Tensors go another way: :mod:`vpipe.runtime.transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

DOING = "sharing what each has"


class ExchangeLine(Protocol):
    """This rank's connection with all ranks."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    def next_name(self, channel: str) -> str:
        """Return the name of the next exchange of a channel, the same on all ranks."""

    def give(self, message: Mapping[str, Any]) -> None:
        """Send a message for :class:`Relay`."""

    def take(self, name: str, doing: str, timeout_s: float | None) -> list[Any]:
        """Wait for the values of all ranks in the exchange of this name. Raises RunError as :class:`Exchange` says."""


class Exchange:
    """Exchange values: anything that JSON holds. All ranks call the same methods in the same order.

    Each method raises RunError when a rank fails, or ends before it takes part; ``doing`` says for that message what
    this rank did.

    Args:
        line: to the other ranks; None for a process that is alone.
        channel: of this object's calls; threads that work beside each other have one each.
        timeout_s: how long a rank may wait for the others; None leaves dead ones to the watchdog, and waits for slow
            ones.
        among: the ranks that take part, in the order in which this object counts them; None: all.
    """

    def __init__(self, line: ExchangeLine | None = None, channel: str = "", timeout_s: float | None = None,
                 among: Sequence[int] | None = None) -> None:
        self._line, self._timeout_s = line, timeout_s
        self._among = list(range(1 if line is None else line.ranks) if among is None else among)
        self._channel = channel if among is None else f"{channel} of {','.join(map(str, among))}"
        self.rank, self.ranks = self._among.index(0 if line is None else line.rank), len(self._among)
        if self.ranks == 1:
            self._line = None

    def all_gather(self, value: Any, doing: str = DOING) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank."""
        if self._line is None:
            return [value]
        name = self._line.next_name(self._channel)
        self._line.give({"give": name, "value": value, "of": self._among})
        return self._line.take(name, doing, self._timeout_s)

    def from_rank(self, value: Any, source: int = 0, doing: str = DOING) -> Any:
        """Return the value of one rank on every rank; those of the others do not count. Alone, return the own."""
        if self._line is None:
            return value
        return self.all_gather(value if self.rank == source else None, doing)[source]

    def united(self, entries: Mapping[str, Any], doing: str = DOING) -> dict[str, Any]:
        """Return the entries of all ranks on every rank."""
        return {name: value for own in self.all_gather(dict(entries), doing) for name, value in own.items()}

    def gather(self, value: Any, doing: str = DOING) -> Callable[[], list[Any]]:
        """Send rank 0 a value without waiting. Returns a function that on rank 0 waits for the values of all and
        returns them; on other ranks it returns none, at once.
        """
        if (line := self._line) is None:
            return lambda: [value]
        name = line.next_name(self._channel)
        line.give({"give": name, "value": value, "of": self._among, "to": self._among[0]})
        return lambda: line.take(name, doing, self._timeout_s) if self.rank == 0 else []

    def agree(self, vote: str, decide: Callable[[list[str]], str], doing: str = DOING) -> str:
        """Return the decision on the votes of all ranks, by rank, on every rank.

        Args:
            decide: called on rank 0 alone; what it raises, rank 0 raises, and the other ranks RuntimeError.
        """
        votes = self.gather(vote, doing)()
        decision, failure = "", None
        if self.rank == 0:
            try:
                decision = decide(votes)
            except BaseException as error:
                failure = error
        what = None if failure is None else f"rank 0 could not decide: {type(failure).__name__}: {failure}"
        found, what = self.from_rank([decision, what], 0, doing)
        if failure is not None:
            raise failure
        if what is not None:
            raise RuntimeError(what)
        return str(found)


class Relay:
    """Rank 0's side: collect what ranks give, and return what is to be sent to whom."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._given: dict[str, dict[int, Any]] = {}
        self._among: dict[str, Sequence[int]] = {}
        self._left: set[int] = set()

    def give(self, rank: int, message: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Take a rank's value of an exchange; yield the values of all when it is the last.

        Args:
            message: ``give``, the name of the exchange; ``value``; ``of``, the ranks that take part; ``to``, the only
                rank that is to have them.
        """
        name, among = message["give"], message["of"]
        values = self._given.setdefault(name, {})
        self._among[name] = among
        values[rank] = message["value"]
        if len(values) == len(among):
            del self._given[name], self._among[name]
            for listener in [message["to"]] if "to" in message else among:
                yield listener, {"given": name, "values": [values[other] for other in among]}
        elif missing := self._left.intersection(among) - values.keys():
            yield rank, {"given": name, "without": min(missing)}

    def late(self, rank: int, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Tell a rank that gave up an exchange for whom it waited."""
        if missing := set(self._among.get(name, range(self._ranks))) - self._given.get(name, {}).keys():
            yield rank, {"given": name, "late": min(missing)}

    def leave(self, rank: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Note that a rank has ended its program: an exchange that waits for it has no end."""
        self._left.add(rank)
        for name, values in self._given.items():
            if rank in self._among[name] and rank not in values:
                yield from ((listener, {"given": name, "without": rank}) for listener in values)
