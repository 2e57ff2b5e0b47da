"""Ranks that share the cores of their host.

When more of them compute than the host has cores, all slow down alike (processor sharing): n of them on c cores each go
on at the speed c/n. Every host keeps a virtual clock, which runs at that speed; an action takes as much of it as it
takes of a core's time, however often its speed changes meanwhile. So the actions of a host end in the order of their
virtual ends, and only the first of them has an end in real time that need be known.

Copying from rank to rank is work as well: a transfer takes of a core at either end as long as it takes its link.
"""

from __future__ import annotations

from heapq import heappop, heappush

from vpipe.schedules.simulation.costs import Costs, Number, ratio
from vpipe.schedules.simulation.run import Run
from vpipe.schedules.simulation.tables import Tables


class Host:
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


class SharedRun(Run):
    """One run through the tables with ``costs.cores`` on every host."""

    def __init__(self, tables: Tables, costs: Costs) -> None:
        assert costs.cores is not None
        super().__init__(tables, costs.overlap)
        ranks = len(tables.firsts)
        names = costs.hosts or (0,) * ranks
        hosts = {name: Host(costs.cores) for name in names}
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
