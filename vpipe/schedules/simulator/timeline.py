"""The timeline of a simulated schedule: its events and transfers, idle times and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from vpipe.schedules.action import RETURNS, Action, Op
from vpipe.schedules.costs import Costs, Number
from vpipe.schedules.peaks import stage_loads
from vpipe.schedules.schedule import Schedule, stages_of_rank

TIMED = frozenset({Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT, Op.RECOMPUTE, Op.STEP})
"""Operations that keep a rank busy; the others take no time of it."""

Curve = tuple[tuple[Number, Number], ...]
"""(time in seconds, bytes held from then on), in order; of several points at one time the last holds."""


@dataclass(frozen=True, slots=True)
class Event:
    """A compute action or an optimizer step on its rank."""

    action: Action
    start_s: Number
    end_s: Number


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """A send, or a replica's part in a sum, from rank to rank; it takes its link from ``start_s`` on."""

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
    """

    schedule: Schedule
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[TransferEvent, ...]

    @cached_property
    def makespan_s(self) -> Number:
        """The time at which the last action has ended and the last transfer has arrived."""
        arrivals = (transfer.end_s for transfer in self.transfers)
        return max(max(last for _, last in self.spans_s), max(arrivals, default=0))

    @cached_property
    def spans_s(self) -> tuple[tuple[Number, Number], ...]:
        """Per rank, the first start and the last end of something that keeps it busy."""
        spans = [(events[0].start_s, max(event.end_s for event in events)) for events in self.events]
        for transfer in self._blocking:
            for rank in (transfer.source, transfer.target):
                first, last = spans[rank]
                spans[rank] = (min(first, transfer.start_s), max(last, transfer.end_s))
        return tuple(spans)

    @cached_property
    def work_s(self) -> tuple[Number, ...]:
        """Per rank, the time that its actions take."""
        return tuple(sum((event.end_s - event.start_s for event in events), start=0) for events in self.events)

    @cached_property
    def busy_s(self) -> tuple[Number, ...]:
        """Per rank, its work and the transfers that keep it from working."""
        busy = list(self.work_s)
        for transfer in self._blocking:
            for rank in (transfer.source, transfer.target):
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

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """Per rank, its activations, weight halves and weight versions; see ``StageCosts``.

        A forward holds its activations from its start; everything else changes at the end of an action.
        """
        return tuple(tuple(self._held(rank)) for rank in range(len(self.events)))

    @property
    def peak_bytes(self) -> tuple[Number, ...]:
        """Per rank, the most that it ever holds."""
        return tuple(max(held for _, held in curve) for curve in self.memory)

    @property
    def _blocking(self) -> tuple[TransferEvent, ...]:
        return () if self.costs.overlap else self.transfers

    def _held(self, rank: int) -> Iterator[tuple[Number, Number]]:
        program = self.schedule.programs[rank]
        stages = stages_of_rank(self.schedule.placement, rank)
        recomputed = recomputations(program)
        versions = self._version_changes(rank)
        held: Number = sum((self.costs.stages[stage].version_bytes for stage in stages), start=0)
        now: Number = 0
        yield now, held
        events = iter(self.events[rank])
        for position, action in enumerate(program):
            change = versions.get(position, 0)
            if action.op not in TIMED:
                if change:
                    held += change
                    yield now, held
                continue
            event, cost = next(events), self.costs.stages[action.stage]
            now = event.end_s
            explicit = (action.stage, action.microbatch) in recomputed
            dropped = explicit or cost.recompute_s > 0
            if action.op is Op.FORWARD:
                held += change + (cost.kept_bytes if dropped else cost.activation_bytes)
                yield event.start_s, held
                continue
            if action.op is Op.RECOMPUTE or (action.op in RETURNS and dropped and not explicit):
                held += cost.activation_bytes - cost.kept_bytes
                yield event.start_s, held
            if action.op is Op.INPUT:
                change += cost.weight_half_bytes - cost.activation_bytes
            elif action.op is Op.BACKWARD:
                change -= cost.activation_bytes
            elif action.op is Op.WEIGHT:
                change -= cost.weight_half_bytes
            if change:
                held += change
                yield now, held

    def _version_changes(self, rank: int) -> dict[int, Number]:
        """Return, by position in the program, the bytes of weight versions that are added or, below 0, freed."""
        changes: dict[int, Number] = {}
        for stage in stages_of_rank(self.schedule.placement, rank):
            if size := self.costs.stages[stage].version_bytes:
                loads = [(-1, 1), *((load.position, load.versions)
                                    for load in stage_loads(self.schedule.programs[rank], stage))]
                changes |= {position: (after - before) * size
                            for (_, before), (position, after) in pairwise(loads) if after != before}
        return changes


def recomputations(program: Sequence[Action]) -> set[tuple[int, int]]:
    """Return (stage, microbatch) of everything that ``program`` recomputes before the backward."""
    return {(action.stage, action.microbatch) for action in program if action.op is Op.RECOMPUTE}
