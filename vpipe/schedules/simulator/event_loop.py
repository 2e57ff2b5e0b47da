"""One run of the simulator through its tables: what happens next, until nothing does."""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush

from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.simulator.tables import SimulationTables


class EventLoop:
    """One run through the tables, every rank at its own speed.

    Attributes:
        cursors: per rank, the number of the action it stands before.
        starts: per action that takes time, when it starts.
        arrivals: (number of the way, when it arrives), in order.
    """

    def __init__(self, tables: SimulationTables, overlap: bool) -> None:
        self._tables, self._overlap = tables, overlap
        ranks, actions = len(tables.firsts), len(tables.ticks)
        self.cursors = list(tables.firsts)
        self.starts: list[Number] = [0] * actions
        self.arrivals: list[tuple[int, Number]] = []
        self._now: Number = 0
        self._awaited = [0] * actions  # ways that each action has yet to wait for
        for way in tables.ways:
            for user in way.users:
                self._awaited[user] += 1
        self._unopened = [way.opens for way in tables.ways]
        self._busy = [False] * ranks
        self._awake = list(range(ranks))  # those that may be able to go on
        self._ready: set[int] = set()  # those that stand before an action that takes time and needs nothing more
        # A heap: which action ends when, and which way (counted from behind the actions) arrives when.
        self._ending: list[tuple[Number, int]] = []
        self._links: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # with overlap: first the way that it takes
        self._standing: list[int] = []  # without: ways that wait until both ranks are free
        self._sending = [0] * ranks  # without: ways of its own that a rank waits for

    def to_end(self) -> None:
        """Every rank as far as it comes."""
        ending, awake = self._ending, self._awake
        while True:
            while awake or self._ready:
                while awake:
                    self._hand_over(awake.pop())
                if self._standing:  # they go first
                    self._take_ways()
                self._begin()
            if not self._go_on():
                return
            while ending and ending[0][0] == self._now:
                self._finish(heappop(ending)[1])

    def end(self, number: int, ticks: Number) -> Number:
        """When an action, which takes ``ticks`` where nobody disturbs it, has ended."""
        return self.starts[number] + ticks

    def began(self, way: int, end: Number) -> Number:
        """When a way started that arrives at ``end``."""
        return end - self._tables.ways[way].ticks

    def _go_on(self) -> bool:
        """To the next moment at which something ends, if there is one."""
        if self._ending:
            self._now = self._ending[0][0]
        return bool(self._ending)

    def _finish(self, number: int) -> None:
        """An action has ended, or a way."""
        actions = len(self.starts)
        if number >= actions:
            self._close(number - actions)
            return
        rank = self._tables.rank_of[number]
        self._busy[rank] = False
        if number in self._tables.opened:
            self._pass(number, rank)
        self._awake.append(rank)

    def _hand_over(self, rank: int) -> None:
        """Let a rank pass what takes no time."""
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
            self.starts[cursor] = self._now
            self.cursors[rank] = cursor + 1
            if ticks:
                self._busy[rank] = True
                self._engage(cursor, ticks)
            else:
                if cursor in self._tables.opened:
                    self._pass(cursor, rank)
                self._awake.append(rank)
        self._ready.clear()

    def _engage(self, number: int, ticks: Number) -> None:
        """An action begins."""
        heappush(self._ending, (self._now + ticks, number))

    def _pass(self, action: int, rank: int) -> None:
        """Open the ways that begin behind an action."""
        for number in self._tables.opened[action]:
            way = self._tables.ways[number]
            if not self._overlap and way.ticks and way.source == rank:
                self._sending[rank] += 1
            self._open(number)

    def _open(self, number: int) -> None:
        """Note that one end of a way has been reached; with the last of them it may start."""
        self._unopened[number] -= 1
        if self._unopened[number]:
            return
        way = self._tables.ways[number]
        if not way.ticks:
            self._arrive(number)
        elif self._overlap:
            link = self._links[way.source, way.target]
            link.append(number)
            if len(link) == 1:
                self._start(number)
        else:
            self._standing.append(number)

    def _take_ways(self) -> None:
        """Without overlap: start every way whose ranks are both free."""
        for number in tuple(self._standing):
            way = self._tables.ways[number]
            if not self._busy[way.source] and not self._busy[way.target]:
                self._busy[way.source] = self._busy[way.target] = True
                self._standing.remove(number)
                self._start(number)

    def _start(self, number: int) -> None:
        heappush(self._ending, (self._now + self._tables.ways[number].ticks, len(self.starts) + number))

    def _close(self, number: int) -> None:
        """Give back what a way took up."""
        way = self._tables.ways[number]
        if self._overlap:
            link = self._links[way.source, way.target]
            link.popleft()
            if link:
                self._start(link[0])
        else:
            self._busy[way.source] = self._busy[way.target] = False
            self._sending[way.source] -= 1
            self._awake += (way.source, way.target)
        self._arrive(number)

    def _arrive(self, number: int) -> None:
        self.arrivals.append((number, self._now))
        for user in self._tables.ways[number].users:
            self._awaited[user] -= 1
            if not self._awaited[user]:
                self._awake.append(self._tables.rank_of[user])


class SharedCores:
    """The cores of one host, and what is on them: actions, and ends of ways."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._clock: Number = 0
        self._set: Number = 0  # when the clock was last read, in real time
        self._working: list[tuple[Number, int]] = []  # a heap: the virtual end and number of each

    def begin(self, now: Number, number: int, ticks: Number) -> None:
        """Something begins that takes ``ticks`` of a core."""
        if (count := len(self._working)) > self._cores:
            self._clock += ratio((now - self._set) * self._cores, count)
        else:
            self._clock += now - self._set
        self._set = now
        heappush(self._working, (self._clock + ticks, number))

    def next_end(self) -> Number | None:
        """When the first of these ends if nothing begins before that."""
        if not self._working:
            return None
        left = max(0, self._working[0][0] - self._clock)  # rounding may have carried the clock past it
        count = len(self._working)
        return self._set + (ratio(left * count, self._cores) if count > self._cores else left)

    def finished(self, now: Number) -> list[int]:
        """What ends now, which is when :meth:`next_end` said."""
        self._clock, self._set = self._working[0][0], now
        done = []
        while self._working and self._working[0][0] == self._clock:
            done.append(heappop(self._working)[1])
        return done


class SharedCoresLoop(EventLoop):
    """One run through the tables with ``costs.cores`` on every host."""

    def __init__(self, tables: SimulationTables, costs: Costs) -> None:
        assert costs.cores is not None
        super().__init__(tables, costs.overlap)
        ranks = len(tables.firsts)
        names = costs.hosts or (0,) * ranks
        hosts = {name: SharedCores(costs.cores) for name in names}
        self._hosts = list(hosts.values())
        self._host_of = [hosts[names[rank]] for rank in range(ranks)]
        self._ends: dict[int, Number] = {}
        self._began: dict[int, Number] = {}  # by way
        self._half_done: set[int] = set()  # ways of which one end is through

    def began(self, way: int, end: Number) -> Number:
        return self._began.get(way, end)

    def end(self, number: int, ticks: Number) -> Number:
        return self._ends.get(number, self.starts[number])  # one that takes nothing ends as it starts

    def _engage(self, number: int, ticks: Number) -> None:
        self._host_of[self._tables.rank_of[number]].begin(self._now, number, ticks)

    def _start(self, number: int) -> None:
        way = self._tables.ways[number]
        self._began[number] = self._now
        for rank in (way.source, way.target):
            self._host_of[rank].begin(self._now, len(self.starts) + number, way.ticks)

    def _go_on(self) -> bool:
        ends = [(end, host) for host in self._hosts if (end := host.next_end()) is not None]
        if not ends:
            return False
        self._now = min(end for end, _ in ends)
        for end, host in ends:
            if end == self._now:
                for number in host.finished(end):
                    self._finish(number)
        return True

    def _finish(self, number: int) -> None:
        way = number - len(self.starts)
        if way < 0:
            self._ends[number] = self._now
        elif way not in self._half_done:
            self._half_done.add(way)
            return
        super()._finish(number)
