"""Simulate a schedule: compute when every action starts and ends, idle times and memory.

A rank does its actions in order, one at a time, each as soon as its inputs have arrived. Only compute actions, steps,
and copies to the host and back take a rank's time. A transfer starts when its send and its receive have been reached
and its link is free. A compute-only schedule has the same transfers, with receives that are posted from the beginning.
Tensors that stay on a rank take no time. Where norms are exchanged, a step waits for those of all stages. Replicas of a
stage send each other the gradients of an update as soon as each has them all, and the sums as soon as these are made; a
step waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import NamedTuple

from vpipe.errors import UserError
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.kinds import Action, Needed, Value
from vpipe.schedules.rewrites import freeze
from vpipe.schedules.schedule import Schedule, SizeOf, moments, recomputations
from vpipe.schedules.simulator.event_loop import EventLoop, SimulationTables

Curve = tuple[tuple[Number, Number], ...]
"""(time in seconds, bytes held from then on), in order; of several points at one time the last holds."""


class Event(NamedTuple):
    """A compute action, an optimizer step, or a copy to the host or back, on its rank."""

    action: Action
    start_s: Number
    end_s: Number


class TransferEvent(NamedTuple):
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
        makespan_s: the time at which the last action has ended and the last transfer has arrived.
        busy_between_s: per rank, the first start and the last end of something that keeps it busy.
        work_s: per rank, the time that its actions take.
    """

    schedule: Schedule
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[TransferEvent, ...]
    makespan_s: Number
    busy_between_s: tuple[tuple[Number, Number], ...]
    work_s: tuple[Number, ...]

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, events: tuple[tuple[Event, ...], ...],
           transfers: tuple[TransferEvent, ...]) -> Timeline:
        between = [(own[0].start_s, max(event.end_s for event in own)) for own in events]
        for transfer in () if costs.overlap else transfers:
            for rank in {transfer.source, transfer.target}:
                first, last = between[rank]
                between[rank] = (min(first, transfer.start_s), max(last, transfer.end_s))
        arrival = max((transfer.end_s for transfer in transfers), default=0)
        work = tuple(sum((event.end_s - event.start_s for event in own), start=0) for own in events)
        return cls(schedule, costs, events, transfers, max(arrival, *(last for _, last in between)), tuple(between),
                   work)

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
            busy_between_s=tuple((seconds(first), seconds(last)) for first, last in self.busy_between_s))

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
        return tuple(last - first - busy for (first, last), busy in zip(self.busy_between_s, self.busy_s, strict=True))

    @property
    def bubble_s(self) -> Number:
        """The longest time of a rank from first start to last end, less the work of the rank that has most.

        So unequal stages alone make no bubble: the slowest rank could not be faster.
        """
        return max(last - first for first, last in self.busy_between_s) - max(self.work_s)

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
        return tuple(map(self._held, range(len(self.events))))

    @property
    def period_s(self) -> float:
        """The time from one step of training to the next; of a stream, in its steady state, without recomputation."""
        schedule = lengthened(self.schedule) if self.schedule.stream else self.schedule.compute_only()
        return simulate_steps(schedule, self.costs).step_s

    @property
    def peak_bytes(self) -> tuple[Number, ...]:
        """Per rank, the most that it ever holds."""
        return tuple(max(held for _, held in curve) for curve in self.memory)

    def _held(self, rank: int) -> Curve:
        events = iter(self.events[rank])
        now: Number = 0
        before: Number = -1
        points: list[tuple[Number, Number]] = []
        program = self.schedule.programs[rank]
        versions = [stage for stage in self.schedule.stages_of(rank) if self.costs.stages[stage].version_bytes]
        timed = [next(events) if action.op.takes_time else None for action in program]
        for position, at_start, _, held in moments(program, bytes_in(program, self.costs), self.schedule.frozen,
                                                   versions):
            event = timed[position] if position >= 0 else None
            now = now if event is None else event.end_s
            if held != before:
                points.append((now if event is None else event.start_s if at_start else event.end_s, held))
            before = held
        return tuple(points)


def bytes_in(program: Sequence[Action], costs: Costs) -> SizeOf:
    """Return a size function for the bytes of what a program holds."""
    early, recomputing = recomputations(program), [replace(cost, recompute_s=1) for cost in costs.stages]

    @cache
    def size(value: Value, stage: int, is_early: bool) -> Number:
        number = value.bytes((recomputing if is_early else costs.stages)[stage])
        return Fraction(number) if isinstance(number, float) else number  # so that running sums come back to 0

    return lambda value, stage, index: size(value, stage, (stage, index) in early)


def peak_contents(program: Sequence[Action], stages: Sequence[int], costs: Costs,
                  frozen: int = 0) -> Counter[tuple[Value, int]]:
    """Return how many values of each stage a rank holds at the first moment when it holds most bytes."""
    most: Number = -1
    fullest: Mapping[Needed, int] = {}
    for moment in moments(program, bytes_in(program, costs), frozen, stages):
        if moment.size > most:
            most, fullest = moment.size, dict(moment.held)
    return Counter((value, stage) for (value, stage, _), count in fullest.items() for _ in range(count))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate ``schedule``, compute-only or lowered, at ``costs``; exactly, as long as none of them is a ``float``.

    The schedule must have passed :func:`~vpipe.schedules.checker.check`.

    Raises:
        UserError: ``costs`` are for another number of stages or ranks.
        CheckError: ranks wait for each other.
    """
    if len(costs.stages) != schedule.stages:
        raise UserError(f"there are costs for {len(costs.stages)} stages, but schedule '{schedule.name}' has "
                        f"{schedule.stages}", hint="give one entry per stage")
    if costs.hosts and len(costs.hosts) != schedule.ranks:
        raise UserError(f"there are hosts for {len(costs.hosts)} ranks, but schedule '{schedule.name}' has "
                        f"{schedule.ranks}", hint="give one entry per rank, or none where all share one host")
    if costs.cores is not None and costs.cores < 1:
        raise UserError(f"a host has {costs.cores} cores", hint="give 1 or more, or None for a device per rank")
    tables = SimulationTables.from_schedule(schedule, costs)
    loop = EventLoop(tables, costs)
    loop.run()
    if loop.cursors != tables.ends:
        positions = [cursor - first for cursor, first in zip(loop.cursors, tables.firsts, strict=True)]
        programs = tables.schedule.programs
        spots = [(rank, position) for rank, position in enumerate(positions) if position < len(programs[rank])]
        standing = "; ".join(f"rank {rank} stands before {programs[rank][position]}" for rank, position in spots)
        raise tables.schedule.error(f"the simulation cannot go on: {standing}",
                                    "check the schedule first: it says what each of them waits for", *spots,
                                    cursors=positions)
    events = [tuple(Event(action, loop.starts[number], loop.ends[number])
                    for number, action in enumerate(program, start=first) if tables.ticks[number] is not None)
              for first, program in zip(tables.firsts, tables.schedule.programs, strict=True)]
    transfers = [TransferEvent(message.action, message.source, message.target, start, end)
                 for number, start, end in loop.arrivals
                 if (message := tables.messages[number]).source != message.target]
    return Timeline.of(tables.lowered, costs, tuple(events), tuple(transfers)).in_seconds(tables.unit)


def lengthened(stream: Schedule, recompute: Collection[int] = ()) -> Schedule:
    """Return a stream that is long enough to have a steady state in its middle."""
    longer = build(stream.name, stream.placement, sum(_stream_steps(stream)) * stream.assignment.per_step,
                   stream.update_every, stream.ties, recompute, warmup=stream.warmup)
    return freeze(longer, stream.frozen)


_SETTLING = 12
"""Microbatches beyond those in flight after which a stream repeats itself, and over which a mean is good, nearly."""


def _stream_steps(schedule: Schedule) -> tuple[int, int, int]:
    """Return the steps of a simulated stream: while it fills, those that count, while it drains."""
    per_step = schedule.assignment.per_step
    in_flight = max(schedule.ranks, *(len(ranks) * (depth + 1)  # over the whole pipeline, whatever the widths
                                      for ranks, depth in zip(schedule.placement, schedule.warmup, strict=True)))
    return (-(-(in_flight + _SETTLING) // per_step) + 1,
            max(2, -(-max(_SETTLING, in_flight // 2) // per_step)), -(-in_flight // per_step))


@dataclass(frozen=True)
class SimulatedSteps:
    # of one batch from an empty pipeline to an empty one; of a stream, of its first microbatches
    timeline: Timeline
    step_s: float  # the time from step to step
    working_s: tuple[float, ...]  # per rank and step, how long it computes or steps, at the speed that it has


def simulate_steps(schedule: Schedule, costs: Costs) -> SimulatedSteps:
    """Simulate several steps of training: a schedule's batch twice, or a stream that is :func:`lengthened`."""
    return _simulate_stream(schedule, costs) if schedule.stream else _simulate_batches(schedule, costs)


def _simulate_batches(schedule: Schedule, costs: Costs) -> SimulatedSteps:
    """Simulate two batches: the second may begin on a rank while other ranks finish the first.

    Only one, where weights are tied and replicas take unequally many microbatches: numbered on, the microbatches of a
    second batch would go to other replicas than the first's, which tied weights do not allow.
    """
    if schedule.ties and any(schedule.microbatches % len(group) for group in schedule.placement):
        timeline = simulate(schedule, costs)
        return SimulatedSteps(timeline, _end_s(timeline.events), _working_s(timeline.events))

    def per_batch(action: Action) -> int:  # by how much the index differs from that in the batch before
        return schedule.microbatches if action.op.per_microbatch else schedule.updates(action.stage)

    twice = schedule.with_programs([(*program, *(
        Action(action.op, action.stage, action.index + per_batch(action)) for action in program))
        for program in schedule.programs])
    timeline = simulate(replace(twice, microbatches=2 * schedule.microbatches), costs)
    halves = [len(events) // 2 for events in timeline.events]
    events = tuple(events[:half] for events, half in zip(timeline.events, halves, strict=True))
    later = tuple(events[half:] for events, half in zip(timeline.events, halves, strict=True))
    alone = [tuple(action for action in program if action.index < per_batch(action))
             for program in timeline.schedule.programs]
    transfers = tuple(transfer for transfer in timeline.transfers if transfer.action.index < per_batch(transfer.action))
    steps = schedule.microbatches // schedule.assignment.per_step
    return SimulatedSteps(Timeline.of(schedule.with_programs(alone), costs, events, transfers),
                           (_end_s(later) - _end_s(events)) / steps,
                           tuple(seconds / steps for seconds in _working_s(later)))


def _end_s(events: Sequence[Sequence[Event]]) -> float:
    return max(float(event.end_s) for of_rank in events for event in of_rank)


def _working_s(events: Sequence[Sequence[Event]]) -> tuple[float, ...]:
    return tuple(float(sum(event.end_s - event.start_s for event in of_rank)) for of_rank in events)


def _simulate_stream(schedule: Schedule, costs: Costs) -> SimulatedSteps:
    """Simulate a stream, and average over steps in its middle, as the last stage makes them."""
    timeline, assignment = simulate(schedule, costs), schedule.assignment
    filling, counting, _ = _stream_steps(schedule)
    last = schedule.stages - 1
    made: dict[int, float] = {}  # by update of the last stage, when its last replica had made it
    for rank in schedule.placement[last]:
        for event in timeline.events[rank]:
            if event.action.op.makes_version and event.action.stage == last:
                update = event.action.index
                made[update] = max(float(event.end_s), made.get(update, 0.0))
    per_step = assignment.per_step // assignment.per_update(last)
    begin, end = (made[steps * per_step - 1] for steps in (filling, filling + counting))
    working = tuple(sum(max(0.0, min(end, float(event.end_s)) - max(begin, float(event.start_s)))
                        for event in events) / counting for events in timeline.events)
    return SimulatedSteps(timeline, (end - begin) / counting, working)
