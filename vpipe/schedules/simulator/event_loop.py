"""Tabulate a schedule - numbered actions, their times, and the messages between them - and simulate it event by event.

Ranks that share the cores of their host slow down alike when more of them compute than it has cores (processor
sharing): n of them on c cores each go on at the speed c/n. Every host keeps a virtual clock, which runs at that speed;
an action takes as much of it as it takes of a core's time, however often its speed changes meanwhile. So the actions of
a host end in the order of their virtual ends, and only the first of them has an end in real time that must be known.
Copying from rank to rank is work as well: a transfer takes a core at either end as long as it takes its link.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate
from math import lcm

from vpipe.errors import UserError
from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.graph import receive_of
from vpipe.schedules.kinds import Action, Kind
from vpipe.schedules.lowering import add_transfers
from vpipe.schedules.schedule import Schedule, recomputations


@dataclass(slots=True)
class Message:
    """A message from one action to others."""

    # the send; or a norm, which reaches every step at once; or a sum over replicas, both for the gradients that go into
    # it and for its result
    action: Action
    source: int  # the rank of the send
    target: int  # the rank of the receive; ``source`` when no link is used
    ticks: Number  # that it takes
    users: tuple[int, ...]  # the numbers of the actions that wait for it
    opens: int  # how many actions must be reached before it starts: the send, and the receive unless that is posted


@dataclass(frozen=True)
class SimulationTables:
    """A lowered schedule, its actions numbered rank after rank."""

    lowered: Schedule
    schedule: Schedule  # the same, without receives that are posted from the beginning
    # ticks per second. Times are whole numbers of ticks, which are many times faster than fractions; with a ``float``
    # among the costs a tick is a second and times stay as they are.
    unit: int
    firsts: list[int]  # per rank, the number of its first action
    ends: list[int]  # per rank, the number after its last
    rank_of: list[int]  # per action, its rank
    ticks: list[Number | None]  # per action, the ticks that it takes; None when it takes no time of its rank
    messages: list[Message] = field(default_factory=list)  # everything that is sent or published
    # by action, the messages that it opens, as their send, norm or receive, as the last of a replica's gradients, or as
    # its sum
    opened: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def from_schedule(cls, schedule: Schedule, costs: Costs) -> SimulationTables:
        """Tabulate ``schedule``, compute-only (then its receives are posted from the beginning) or lowered."""
        posted = not schedule.is_lowered
        lowered = add_transfers(schedule) if posted else schedule
        if posted:
            schedule = lowered.with_programs([[action for action in program if not action.op.receives]
                                              for program in lowered.programs])
        graph = schedule.graph
        widths = [len(ranks) for ranks in schedule.placement]
        unit = _ticks_per_second(schedule.kinds, costs, widths)
        ends = list(accumulate(map(len, schedule.programs)))
        tables = cls(lowered, schedule, unit, [0, *ends[:-1]], ends,
                     [rank for rank, program in enumerate(schedule.programs) for _ in program],
                     list(_ticks(schedule, costs, unit)))

        @cache
        def ticks(kind: Kind, stage: int, source: int, target: int) -> Number:
            cost = costs.stages[stage]
            size = ratio(cost.reduce_bytes, widths[stage]) if kind.transfer is None else kind.transfer.bytes(cost)
            return 0 if source == target else ratio(costs.link(source, target).transfer_s(size) * unit, 1)

        users: dict[tuple[int, int], list[int]] = defaultdict(list)  # by what is waited for, and the rank that waits
        for rank, first in enumerate(tables.firsts):
            for number, spots in enumerate(graph.waits[rank], start=first):
                for spot in spots:
                    if spot is not None:
                        users[tables.firsts[spot[0]] + spot[1], rank].append(number)
        published = {number for number, _ in users}

        def number_of(action: Action, rank: int) -> int:
            return tables.firsts[rank] + (graph.position(action, rank) or 0)

        for rank, (first, program) in enumerate(zip(tables.firsts, schedule.programs, strict=True)):
            for number, action in enumerate(program, start=first):
                op, stage = action.op, action.stage
                if op.sends and op.transfer is not None:
                    for target in op.transfer.peers(graph.setting, stage, action.index, rank):
                        tables._add(Message(action, rank, target, ticks(op, stage, rank, target),
                                            tuple(users.get((number, target), ())), 1 if posted else 2),
                                    number, *(() if posted else (number_of(receive_of(action), target),)))
                elif op.summed:
                    parts = [needed for needed in op.needs(graph.setting, stage, action.index, rank)
                             if needed[0].homes is not None]
                    for other in schedule.placement[stage]:
                        for part in parts:
                            if other != rank and (made := graph.maker(*part, other)) is not None:
                                tables._add(Message(action, other, rank, ticks(op, stage, other, rank), (number,), 1),
                                            number_of(made, other))
                        if other != rank and (number, other) in users:  # else no one needs it
                            tables._add(Message(action, rank, other, ticks(op, stage, rank, other),
                                                tuple(users[number, other]), 1), number)
                elif number in published and not op.computes:  # known to all as soon as it is there
                    waiting = tuple(user for other in range(schedule.ranks) for user in users.get((number, other), ()))
                    tables._add(Message(action, rank, rank, 0, waiting, 1), number)
        return tables

    def _add(self, message: Message, *openers: int) -> None:
        for opener in openers:
            self.opened[opener] = (*self.opened.get(opener, ()), len(self.messages))
        self.messages.append(message)


def _ticks(schedule: Schedule, costs: Costs, unit: int) -> Iterator[Number | None]:
    """Yield the ticks of each action, rank after rank; None when it takes no time of its rank."""
    @cache
    def ticks(kind: Kind, stage: int, alone: bool) -> Number:
        more = costs.stages[stage].recompute_s if alone else 0
        return ratio((_seconds(kind, stage, costs) + more) * unit, 1)  # an int for a whole number

    for program in schedule.programs:
        recomputed = recomputations(program)
        for op, stage, index in program:
            yield None if not op.takes_time else ticks(op, stage, op.returns and (stage, index) not in recomputed)


def _seconds(kind: Kind, stage: int, costs: Costs) -> Number:
    seconds = costs.seconds.get((kind, stage))
    if seconds is None and kind.host_bytes is not None:
        seconds = costs.host_link.transfer_s(kind.host_bytes(costs.stages[stage]))
    elif seconds is None:
        assert kind.seconds is not None, "it takes time"
        seconds = kind.seconds(costs.stages[stage])
    if not 0 <= seconds < math.inf:
        raise UserError(f"an action {kind} of stage {stage} takes {seconds} seconds",
                        hint="let the kind's row return a finite number from 0 on")
    return seconds


def _ticks_per_second(kinds: Collection[Kind], costs: Costs, widths: Sequence[int]) -> int:
    """Return the fewest that make every time a whole number of ticks; 1 with a ``float`` among them."""
    times: set[Number] = set()
    first_of = {pair: stage for stage, pair in reversed([*enumerate(zip(costs.stages, widths, strict=True))])}
    times.update(costs.seconds.values())
    for (cost, width), stage in first_of.items():
        sizes = {ratio(cost.reduce_bytes, width), *(kind.transfer.bytes(cost) for kind in kinds if kind.transfer)}
        times |= {link.transfer_s(size) for link in {costs.default_link, *costs.links.values()} for size in sizes}
        times |= {cost.recompute_s, *(_seconds(kind, stage, costs) for kind in kinds if kind.takes_time)}
    exact = not any(isinstance(time, float) for time in times)
    return lcm(*(Fraction(time).denominator for time in times)) if exact else 1


class Devices:
    """A device for every rank, with the actions and ends of messages that use them."""

    def __init__(self) -> None:
        self._working: list[tuple[Number, int]] = []  # a heap: the end, by a clock of its own, and number of each

    def begin(self, now: Number, number: int, ticks: Number) -> None:
        """Begin something that takes ``ticks`` of a device or core."""
        heappush(self._working, (now + ticks, number))

    def next_end(self) -> Number | None:
        """Return when the first of them ends if nothing begins before that."""
        return self._working[0][0] if self._working else None

    def finished(self, now: Number) -> list[int]:
        """Return what ends now, at the time of :meth:`next_end`."""
        end, done = self._working[0][0], []
        while self._working and self._working[0][0] == end:
            done.append(heappop(self._working)[1])
        return done


class SharedCores(Devices):
    """The cores of one host."""

    def __init__(self, cores: int) -> None:
        super().__init__()
        self._cores = cores
        self._clock: Number = 0
        self._set: Number = 0  # the real time at which the clock was last read

    def begin(self, now: Number, number: int, ticks: Number) -> None:
        if (count := len(self._working)) > self._cores:
            self._clock += ratio((now - self._set) * self._cores, count)
        else:
            self._clock += now - self._set
        self._set = now
        super().begin(self._clock, number, ticks)

    def next_end(self) -> Number | None:
        if not self._working:
            return None
        left = max(0, self._working[0][0] - self._clock)  # rounding may have carried the clock past it
        count = len(self._working)
        return self._set + (ratio(left * count, self._cores) if count > self._cores else left)

    def finished(self, now: Number) -> list[int]:
        self._clock, self._set = self._working[0][0], now
        return super().finished(now)


class EventLoop:
    """Run through the tables, with ``costs.cores`` on every host or a device for every rank.

    Attributes:
        cursors: per rank, the number of the action before which it stands.
        starts, ends: per action that takes time of its rank.
        arrivals: (number of the message, its start, its arrival), in order.
    """

    def __init__(self, tables: SimulationTables, costs: Costs) -> None:
        self._tables, self._overlap = tables, costs.overlap
        ranks, actions = len(tables.firsts), len(tables.ticks)
        self.cursors = list(tables.firsts)
        self.starts: list[Number] = [0] * actions
        self.ends: list[Number] = [0] * actions
        self.arrivals: list[tuple[int, Number, Number]] = []
        self._began: dict[int, Number] = {}  # by message
        self._copying = [0] * len(tables.messages)  # how many of its ranks still copy each message
        self._now: Number = 0
        self._awaited = [0] * actions  # messages that each action still waits for
        for message in tables.messages:
            for user in message.users:
                self._awaited[user] += 1
        self._unopened = [message.opens for message in tables.messages]
        self._busy = [False] * ranks
        self._awake = list(range(ranks))  # ranks that may be able to go on
        self._ready: set[int] = set()  # ranks that stand before an action that takes time and waits for nothing
        self._shared = costs.cores is not None
        # What works on a host is numbered: actions, and after these messages.
        names = (0,) * ranks if costs.cores is None else costs.hosts or (0,) * ranks
        hosts = {name: Devices() if costs.cores is None else SharedCores(costs.cores) for name in names}
        self._hosts, self._host_of = list(hosts.values()), [hosts[name] for name in names]
        self._links: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # with overlap
        self._standing: list[int] = []  # without: messages that wait until both ranks are free
        self._sending = [0] * ranks  # without: messages of its own that a rank waits for

    def run(self) -> None:
        """Let every rank go as far as it can."""
        awake = self._awake
        while True:
            while awake or self._ready:
                while awake:
                    self._skip_instant(awake.pop())
                if self._standing:  # messages go first
                    self._start_standing()
                self._begin()
            ends = [(end, host) for host in self._hosts if (end := host.next_end()) is not None]
            if not ends:
                return
            self._now = min(end for end, _ in ends)
            for end, host in ends:
                if end == self._now:
                    for number in host.finished(end):
                        self._finish(number)

    def _finish(self, number: int) -> None:
        """End an action, or the work of one end of a message; with both ends it arrives."""
        actions = len(self.starts)
        if number >= actions:
            self._copying[number - actions] -= 1
            if not self._copying[number - actions]:
                self._close(number - actions)
            return
        rank = self._tables.rank_of[number]
        self.ends[number] = self._now
        self._busy[rank] = False
        if number in self._tables.opened:
            self._pass(number, rank)
        self._awake.append(rank)

    def _skip_instant(self, rank: int) -> None:
        """Let a rank pass actions that take no time."""
        if self._busy[rank]:
            return
        tables, awaited, sending = self._tables, self._awaited, self._sending
        cursor, end = self.cursors[rank], tables.ends[rank]
        while cursor < end and not awaited[cursor] and not sending[rank]:
            if tables.ticks[cursor] is not None:
                self._ready.add(rank)
                break
            if cursor in tables.opened:
                self._pass(cursor, rank)
            cursor += 1
        self.cursors[rank] = cursor

    def _begin(self) -> None:
        """Begin an action on every rank that is ready, unless a transfer took it."""
        for rank in self._ready:
            if self._busy[rank]:
                continue
            cursor = self.cursors[rank]
            ticks = self._tables.ticks[cursor]
            assert ticks is not None
            self.starts[cursor] = self.ends[cursor] = self._now
            self.cursors[rank] = cursor + 1
            if ticks:
                self._busy[rank] = True
                self._host_of[rank].begin(self._now, cursor, ticks)
            else:
                if cursor in self._tables.opened:
                    self._pass(cursor, rank)
                self._awake.append(rank)
        self._ready.clear()

    def _pass(self, action: int, rank: int) -> None:
        """Open the messages that begin after an action."""
        for number in self._tables.opened[action]:
            message = self._tables.messages[number]
            if not self._overlap and message.ticks and message.source == rank:
                self._sending[rank] += 1
            self._open(number)

    def _open(self, number: int) -> None:
        """Note that one end of a message has been reached; with the last of them it may start."""
        self._unopened[number] -= 1
        if self._unopened[number]:
            return
        message = self._tables.messages[number]
        if not message.ticks:
            self._arrive(number)
        elif self._overlap:
            link = self._links[message.source, message.target]
            link.append(number)
            if len(link) == 1:
                self._start(number)
        else:
            self._standing.append(number)

    def _start_standing(self) -> None:
        """Without overlap: start every message whose ranks are both free."""
        for number in tuple(self._standing):
            message = self._tables.messages[number]
            if not self._busy[message.source] and not self._busy[message.target]:
                self._busy[message.source] = self._busy[message.target] = True
                self._standing.remove(number)
                self._start(number)

    def _start(self, number: int) -> None:
        message = self._tables.messages[number]
        # A core at either end; a device is not taken by it, so there one end tells when it arrives.
        ranks = {message.source, message.target} if self._shared else {message.source}
        self._began[number], self._copying[number] = self._now, len(ranks)
        for rank in ranks:
            self._host_of[rank].begin(self._now, len(self.starts) + number, message.ticks)

    def _close(self, number: int) -> None:
        """Free the link, or the ranks, of a message that arrives."""
        message = self._tables.messages[number]
        if self._overlap:
            link = self._links[message.source, message.target]
            link.popleft()
            if link:
                self._start(link[0])
        else:
            self._busy[message.source] = self._busy[message.target] = False
            self._sending[message.source] -= 1
            self._awake += (message.source, message.target)
        self._arrive(number)

    def _arrive(self, number: int) -> None:
        self.arrivals.append((number, self._began.get(number, self._now), self._now))
        for user in self._tables.messages[number].users:
            self._awaited[user] -= 1
            if not self._awaited[user]:
                self._awake.append(self._tables.rank_of[user])
