"""When every action of a schedule happens: an event-driven simulation.

A rank does its actions in order, one at a time, each as soon as its inputs have arrived. Only compute actions and
steps take a rank's time. A transfer starts when its send and its receive have been reached and its link is free. A
compute-only schedule has the same transfers, with receives that wait from the beginning. What is handed over on one
rank takes no time. Where norms are exchanged, a step waits for those of all stages. Replicas of a stage send each other
the gradients of an update as soon as each has them all, and the sums as soon as these are made; a step waits for them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush

from vpipe.errors import CheckError, UserError
from vpipe.schedules.grid import fault
from vpipe.schedules.order import Schedule
from vpipe.schedules.simulation.costs import Costs, Number, ratio
from vpipe.schedules.simulation.tables import Tables
from vpipe.schedules.simulation.timeline import Event, Timeline, Transfer

__all__ = ["Event", "Timeline", "Transfer", "simulate"]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run ``schedule``, compute-only or lowered, at ``costs``; exactly, as long as none of them is a ``float``.

    The schedule must have passed :func:`~vpipe.schedules.check.check`.

    Raises:
        UserError: ``costs`` are for another number of stages.
        CheckError: ranks wait for each other.
    """
    if len(costs.stages) != schedule.stages:
        raise UserError(f"there are costs for {len(costs.stages)} stages, but schedule '{schedule.name}' has "
                        f"{schedule.stages}", hint="give one entry per stage")
    tables = Tables.of(schedule, costs)
    run = _Run(tables, costs.overlap)
    run.to_end()
    if run.cursors != tables.ends:
        raise _stuck(tables, run.cursors)

    @cache
    def seconds(ticks: Number) -> Number:
        return ratio(ticks, tables.unit)

    events = [tuple(Event(action, seconds(run.starts[number]), seconds(run.starts[number] + ticks))
                    for number, action in enumerate(program, start=first)
                    if (ticks := tables.ticks[number]) is not None)
              for first, program in zip(tables.firsts, tables.schedule.programs, strict=True)]
    transfers = [Transfer(way.action, way.source, way.target, seconds(end - way.ticks), seconds(end))
                 for number, end in run.arrivals if (way := tables.ways[number]).source != way.target]
    return Timeline(tables.schedule, costs, tuple(events), tuple(transfers))


class _Run:
    """One run through the tables.

    Attributes:
        cursors: per rank, the number of the action it stands before.
        starts: per action that takes time, when it starts.
        arrivals: (number of the way, when it arrives), in order.
    """

    def __init__(self, tables: Tables, overlap: bool) -> None:
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
        ending, awake, actions, opened = self._ending, self._awake, len(self._tables.ticks), self._tables.opened
        while True:
            while awake or self._ready:
                while awake:
                    self._hand_over(awake.pop())
                if self._standing:  # they go first
                    self._take_ways()
                self._begin()
            if not ending:
                return
            self._now = now = ending[0][0]
            while ending and ending[0][0] == now:
                number = heappop(ending)[1]
                if number < actions:
                    rank = self._tables.rank_of[number]
                    self._busy[rank] = False
                    if number in opened:
                        self._pass(number, rank)
                    awake.append(rank)
                else:
                    self._close(number - actions)

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
                heappush(self._ending, (self._now + ticks, cursor))
            else:
                if cursor in self._tables.opened:
                    self._pass(cursor, rank)
                self._awake.append(rank)
        self._ready.clear()

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


def _stuck(tables: Tables, cursors: Sequence[int]) -> CheckError:
    spots = [(rank, cursor - first) for rank, (cursor, first, end)
             in enumerate(zip(cursors, tables.firsts, tables.ends, strict=True)) if cursor < end]
    standing = "; ".join(f"rank {rank} stands before {tables.schedule.programs[rank][position]}"
                         for rank, position in spots)
    return fault(tables.schedule, f"the simulation cannot go on: {standing}",
                 "check the schedule first: it says what each of them waits for", *spots,
                 cursors=[cursor - first for cursor, first in zip(cursors, tables.firsts, strict=True)])
