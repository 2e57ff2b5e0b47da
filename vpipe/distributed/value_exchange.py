"""Exchange values between the ranks of a job, over the connections that they have with rank 0's failure detector.

Nobody else has such a connection (docs/faults.md, "Who can reach a run"), a dead rank is noticed there first, and any
thread may exchange values while the main thread trains. Tensors go another way: :mod:`vpipe.runtime.transport`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, Protocol

from vpipe.distributed.fault import Fault
from vpipe.distributed.read_batches import ReadBatch, ReadBatches
from vpipe.errors import Problem, RunError, UserError

DOING = "sharing what each has"
SAME_CALLS = "every rank must make the same calls in the same order, with the same arguments"

Hears = bool | Literal["later"]
"""Whether a rank waits for the values of all: not, before it goes on, or later, and then only until all have given
theirs."""


class ExchangeLine(Protocol):
    """This rank's connection with all; the call that it makes with them, and whether they know that it has failed."""

    call: str
    told: bool

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
    this rank did. A value carries the call in which it is given (:meth:`call`): where these differ, or a rank fails in
    one, all ranks of the exchange raise the same error, and the next one works.

    Args:
        line: to the other ranks; None for a process that is alone.
        channel: of this object's calls; threads that work beside each other have one each.
        timeout_s: how long a rank may wait for the others; None leaves dead ones to the watchdog, and waits for slow
            ones.
        among: the ranks that take part, in the order in which this object counts them; None: all.
    """

    def __init__(self, line: ExchangeLine | None = None, channel: str = "", timeout_s: float | None = None,
                 among: Sequence[int] | None = None) -> None:
        self._line, self._timeout_s, self._of = line, timeout_s, among
        self._among = list(range(1 if line is None else line.ranks) if among is None else among)
        self._channel = channel if among is None else f"{channel} of {','.join(map(str, among))}"
        self.rank, self.ranks = self._among.index(0 if line is None else line.rank), len(self._among)
        self._shown: Sequence[int] = range(self.ranks)
        if self.ranks == 1:
            self._line = None

    def only(self, ranks: Sequence[int]) -> Exchange:
        """Return this exchange with the values of these ranks alone, in which the others take part as before."""
        shown = copy(self)
        shown._shown, shown.rank, shown.ranks = ranks, ranks.index(self.rank), len(ranks)
        return shown

    @contextmanager
    def call(self, what: str, at_once: bool = True) -> Iterator[None]:
        """Make a call with all ranks: it begins when all make the same one, and ends when it has succeeded on all.

        Args:
            what: its name and arguments, to compare.
            at_once: False begins it without waiting for the others.
        """
        if (line := self._line) is None:
            yield
            return
        outer, line.call = line.call, what
        try:
            with self.whole(f"ending {what}", waits=False):  # others may wait for what this one sends
                if at_once:
                    self.all_gather(None, f"beginning {what}")
                else:
                    self.begin(None, what, hears=False)
                yield
        finally:
            line.call = outer

    @contextmanager
    def whole(self, doing: str = DOING, waits: bool = True) -> Iterator[None]:
        """End when this has succeeded on all ranks; raise on all what fails on one, of several users' mistakes that of
        the first rank if this one ``waits`` for the others."""
        if (line := self._line) is not None:
            line.told = False
        try:
            yield
            self.all_gather(None, doing)
        except BaseException as error:
            if line is not None and not line.told:  # the others wait in the next exchange
                name = self._give(line, None, doing, waits, error)
                line.told = True
                if waits and isinstance(error, UserError):
                    self._take(line, name, doing)
            raise

    def all_gather(self, value: Any, doing: str = DOING) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank."""
        return self.begin(value, doing)()

    def begin(self, value: Any, doing: str = DOING, error: BaseException | None = None,
              batches: Sequence[ReadBatch] = (), hears: Hears = True) -> Callable[[], list[Any]]:
        """Give a value without waiting; return a function that waits for those of all ranks, if this one ``hears``; if
        later, until all have given theirs. Where one has an error to give instead, all raise it; where others do
        something else, or the batches that they have read differ, all fail."""
        if (line := self._line) is not None:
            name = self._give(line, value, doing, hears, error, batches)
            if hears == "later":
                return partial(line.take, name, "comparing batches", self._timeout_s)
            return partial(self._take, line, name, doing, error)
        if error is not None:
            raise error
        return lambda: [value]

    def _give(self, line: ExchangeLine, value: Any, doing: str, hears: Hears, error: BaseException | None = None,
              batches: Sequence[ReadBatch] = ()) -> str:
        """Give a value for the next exchange, with this rank's call, or between two and in other channels what it does;
        return the name."""
        name, call = line.next_name(self._channel), (not self._channel and line.call) or doing
        failure: object = None
        if isinstance(error, UserError):
            failure = [asdict(each) for each in error.problems]
        elif error is not None:
            fault = Fault.failed(line.rank, error)
            failure = {"what": f"rank {line.rank} {fault.what}", "hint": fault.hint, "peer": line.rank}
        line.give({"give": name, "value": [call, failure, value], "of": self._of, "hears": hears, "batches": batches})
        return name

    def _take(self, line: ExchangeLine, name: str, doing: str, error: BaseException | None = None) -> list[Any]:
        """Wait for the values of an exchange."""
        of_all = line.take(name, doing, self._timeout_s)
        for rank, (call, failure, _) in zip(self._among, of_all, strict=True):
            if call != of_all[0][0]:
                line.told = True
                raise UserError(f"rank {self._among[0]} is at {of_all[0][0]}, rank {rank} at {call}", hint=SAME_CALLS)
            if failure is not None:
                line.told = True
                try:
                    raise error or (RunError(**failure, rank=line.rank) if isinstance(failure, dict) else
                                    UserError.all_of([Problem(**each) for each in failure]))
                finally:
                    del error  # its frames, and what they hold, go with it
        return [of_all[rank][-1] for rank in self._shown]

    def from_rank(self, value: Any, source: int = 0, doing: str = DOING) -> Any:
        """Return the value of one rank on every rank; those of the others do not count. Alone, return the own."""
        if self.ranks == 1:
            return value
        return self.all_gather(value if self.rank == source else None, doing)[source]

    def united(self, entries: Mapping[str, Any], doing: str = DOING) -> dict[str, Any]:
        """Return the entries of all ranks on every rank."""
        return {name: value for own in self.all_gather(dict(entries), doing) for name, value in own.items()}

    def gather(self, value: Any, doing: str = DOING) -> Callable[[], list[Any]]:
        """Send rank 0 a value without waiting. Returns a function that on rank 0 waits for the values of all and
        returns them; on other ranks it returns none, at once.
        """
        told = self.begin(value, doing, hears=self.rank == 0)
        return told if self.rank == 0 else list

    def agree(self, vote: Any, decide: Callable[[list[Any]], Any], doing: str = DOING) -> Any:
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
        return found


class Relay:
    """Rank 0's side: collect what ranks give, and return what is to be sent to whom.

    Args:
        claim: called with the fault of ranks that do different things, where one of them does not wait to hear so.
    """

    def __init__(self, ranks: int, claim: Callable[[Fault], None] = lambda fault: None) -> None:
        self._ranks, self._claim = ranks, claim
        self._given: dict[str, dict[int, Any]] = {}
        self._batches: defaultdict[str, ReadBatches] = defaultdict(ReadBatches)
        self._among: dict[str, Sequence[int]] = {}
        self._left: set[int] = set()

    def give(self, rank: int, message: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Take a rank's value of an exchange; yield the values of all when it is the last.

        Args:
            message: ``give``, the name of the exchange; ``value``; ``of``, the ranks that take part, None: all;
                ``hears``, whether the rank waits for those of all (:data:`Hears`); ``batches``, those that the rank has
                read. Where these differ from others, all raise it in this exchange; where ranks hear later, they fail
                at once, since they may wait for one another.
        """
        name, among = message["give"], message["of"] or range(self._ranks)
        values = self._given.setdefault(name, {})
        self._among[name] = among
        values[rank] = message
        batches = message.get("batches")
        if batches and message["value"][1] is None and (found := self._batches[name].add(rank, batches)) is not None:
            if message["hears"] == "later":
                self._claim(found)
                return
            peer = next(iter(found.ranks), None)
            message["value"][1] = {"what": found.sentence("rank {}".format), "hint": found.hint, "peer": peer}
        if len(values) == len(among):
            del self._given[name], self._among[name]
            self._batches.pop(name, None)
            of_all = [values[other]["value"] for other in among]
            apart = next((other for other, (call, *_) in zip(among, of_all, strict=True) if call != of_all[0][0]), None)
            if apart is not None and any(each["hears"] is not True and each["value"][1] is None
                                         for each in values.values()):
                self._claim(Fault((among[0],), f"is at {of_all[0][0]}, rank {apart} at {values[apart]['value'][0]}",
                                  SAME_CALLS))
                return
            answers = {True: {"given": name, "values": of_all}, "later": {"given": name, "values": []}}
            yield from ((listener, answers[hears]) for listener in reversed(among)  # rank 0 last
                        if (hears := values[listener]["hears"]))
        elif message["hears"] and (missing := self._left.intersection(among) - values.keys()):
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
                yield from ((listener, {"given": name, "without": rank}) for listener, each in values.items()
                            if each["hears"])
