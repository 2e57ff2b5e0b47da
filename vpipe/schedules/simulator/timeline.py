"""The timeline of a simulated schedule: its events and transfers, idle times and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from vpipe.schedules.action import Action
from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.peaks import moments
from vpipe.schedules.schedule import Schedule

Curve = tuple[tuple[Number, Number], ...]
"""(time in seconds, bytes held from then on), in order; of several points at one time the last holds."""


class Event(NamedTuple):
    """A compute action or an optimizer step on its rank."""

    action: Action
    start_s: Number
    end_s: Number


class TransferEvent(NamedTuple):
    """A send, or a replica's part in a sum, from rank to rank; it takes its link from ``start_s`` on.

    A copy to or from the host has the same rank as ``source`` and ``target``.
    """

    action: Action
    source: int
    target: int
    start_s: Number
    end_s: Number


@dataclass(frozen=True)
class Timeline:
    """A simulated run of all of a schedule's actions, from second 0.

    Attributes:
        schedule: what was simulated, with its sends.
        costs: its costs.
        events: per rank, in order.
        transfers: between ranks, by their end.
        makespan_s: the time at which the last action has ended and the last transfer has arrived.
        spans_s: per rank, the first start and the last end of something that keeps it busy.
        work_s: per rank, the time that its actions take.
    """

    schedule: Schedule
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[TransferEvent, ...]
    makespan_s: Number
    spans_s: tuple[tuple[Number, Number], ...]
    work_s: tuple[Number, ...]

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, events: tuple[tuple[Event, ...], ...],
           transfers: tuple[TransferEvent, ...]) -> Timeline:
        """Return the timeline of these events and transfers."""
        spans = [(own[0].start_s, max(event.end_s for event in own)) for own in events]
        for transfer in () if costs.overlap else transfers:
            for rank in {transfer.source, transfer.target}:
                first, last = spans[rank]
                spans[rank] = (min(first, transfer.start_s), max(last, transfer.end_s))
        arrival = max((transfer.end_s for transfer in transfers), default=0)
        work = tuple(sum((event.end_s - event.start_s for event in own), start=0) for own in events)
        return cls(schedule, costs, events, transfers, max(arrival, *(last for _, last in spans)), tuple(spans), work)

    def in_seconds(self, ticks: int) -> Timeline:
        """Return the same with times in seconds, where those of this one are ticks, so many per second."""
        @cache
        def seconds(time: Number) -> Number:
            return ratio(time, ticks)

        return replace(
            self, events=tuple(tuple(Event(action, seconds(start), seconds(end)) for action, start, end in own)
                               for own in self.events),
            transfers=tuple(each._replace(start_s=seconds(each.start_s), end_s=seconds(each.end_s))
                            for each in self.transfers),
            makespan_s=seconds(self.makespan_s), work_s=tuple(map(seconds, self.work_s)),
            spans_s=tuple((seconds(first), seconds(last)) for first, last in self.spans_s))

    @cached_property
    def busy_s(self) -> tuple[Number, ...]:
        """Per rank, its work and the transfers that keep it from working."""
        busy = list(self.work_s)
        for transfer in () if self.costs.overlap else self.transfers:
            for rank in {transfer.source, transfer.target}:
                busy[rank] += transfer.end_s - transfer.start_s
        return tuple(busy)

    @property
    def idle_s(self) -> tuple[Number, ...]:
        """Per rank, the time that it waits between its first start and its last end."""
        return tuple(last - first - busy for (first, last), busy in zip(self.spans_s, self.busy_s, strict=True))

    @property
    def bubble_s(self) -> Number:
        """The longest time of a rank from first start to last end, less the work of the rank that has most.

        So unequal stages alone make no bubble: the slowest rank could not be faster.
        """
        return max(last - first for first, last in self.spans_s) - max(self.work_s)

    @property
    def bubble_share(self) -> Number:
        """The bubble's share of the time from a rank's first start to its last end."""
        whole = self.bubble_s + max(self.work_s)
        return ratio(self.bubble_s, whole) if whole else 0

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """Per rank, its activations, weight halves and weight versions; see ``StageCosts``.

        A forward and a recomputation take memory at their start; everything else changes at the end of an action.
        """
        _, unit = self.costs.in_units
        curves = map(self._held, range(len(self.events)))
        return tuple(curves) if unit == 1 else tuple(
            tuple((at, ratio(held, unit)) for at, held in curve) for curve in curves)

    @property
    def peak_bytes(self) -> tuple[Number, ...]:
        """Per rank, the most that it ever holds."""
        return tuple(max(held for _, held in curve) for curve in self.memory)

    @cached_property
    def _copies(self) -> tuple[Mapping[Action, TransferEvent], ...]:
        """Per rank, its copies to and from the host."""
        copies: tuple[dict[Action, TransferEvent], ...] = tuple({} for _ in self.events)
        for transfer in self.transfers:
            if transfer.source == transfer.target:
                copies[transfer.source][transfer.action] = transfer
        return copies

    def _held(self, rank: int) -> Curve:
        """Return the curve of a rank in units; what is copied changes it when the copy begins or ends."""
        events = iter(self.events[rank])
        copies = self._copies[rank]
        now: Number = 0
        before: Number = -1
        points: list[tuple[Number, Number]] = []
        program = self.schedule.programs[rank]
        timed = [next(events) if action.op.works else None for action in program]
        for position, at_start, _, held in moments(self.schedule, self.costs, rank):
            event: Event | TransferEvent | None = timed[position] if position >= 0 else None
            now = now if event is None else event.end_s
            if copies and position >= 0:
                event = event or copies.get(program[position])
            if held != before:
                points.append((now if event is None else event.start_s if at_start else event.end_s, held))
            before = held
        if not copies:
            return tuple(points)
        levels = [held for _, held in points]
        changes = [(at, held - before) for (at, held), before in zip(points, [0, *levels], strict=False)]
        changes.sort(key=itemgetter(0))
        return tuple(zip(map(itemgetter(0), changes), accumulate(map(itemgetter(1), changes)), strict=True))
