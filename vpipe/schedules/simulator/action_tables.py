"""Tabulate a schedule for the simulator: numbered actions, their times, and the messages between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import accumulate
from math import lcm

from vpipe.errors import UserError
from vpipe.schedules.action import Action
from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.graph import Graph, receive_of
from vpipe.schedules.kinds import Kind
from vpipe.schedules.loads import recomputations
from vpipe.schedules.lowering import add_transfers
from vpipe.schedules.schedule import Schedule


@dataclass(slots=True)
class Message:
    """A message from one action to others.

    Attributes:
        action: the send; or a norm, which reaches every step at once; or a sum over replicas, both for the gradients
            that go into it and for its result; or a copy to or from the host.
        source: the rank of the send.
        target: the rank of the receive; ``source`` when no link is used.
        ticks: that it takes.
        users: the numbers of the actions that wait for it.
        opens: how many actions must be reached before it starts: the send, and the receive unless that is posted.
    """

    action: Action
    source: int
    target: int
    ticks: Number
    users: tuple[int, ...]
    opens: int


@dataclass(frozen=True)
class SimulationTables:
    """A lowered schedule, its actions numbered rank after rank.

    Attributes:
        lowered: the lowered schedule.
        schedule: the same, without receives that are posted from the beginning.
        unit: ticks per second. Times are whole numbers of ticks, which are many times faster than fractions; with a
            ``float`` among the costs a tick is a second and times stay as they are.
        firsts: per rank, the number of its first action.
        ends: per rank, the number after its last.
        rank_of: per action, its rank.
        ticks: per action, the ticks that it takes; None when it takes no time of its rank.
        messages: everything that is sent or published.
        opened: by action, the messages that it opens, as their send, norm or receive, as the last of a replica's
            gradients, or as its sum.
    """

    lowered: Schedule
    schedule: Schedule
    unit: int
    firsts: list[int]
    ends: list[int]
    rank_of: list[int]
    ticks: list[Number | None]
    messages: list[Message] = field(default_factory=list)
    opened: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def from_schedule(cls, schedule: Schedule, costs: Costs) -> SimulationTables:
        """Tabulate ``schedule``, compute-only (then its receives are posted from the beginning) or lowered."""
        posted = not schedule.is_lowered
        lowered = add_transfers(schedule) if posted else schedule
        if posted:
            schedule = lowered.with_programs([[action for action in program if not action.op.receives]
                                              for program in lowered.programs])
        graph = Graph.from_schedule(schedule)
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

        copies = any(kind.host_bytes is not None for kind in schedule.kinds)
        users: dict[tuple[int, int], list[int]] = defaultdict(list)  # by what is waited for, and the rank that waits
        for rank, (first, program) in enumerate(zip(tables.firsts, schedule.programs, strict=True)):
            for number, (action, spots) in enumerate(zip(program, graph.waits[rank], strict=True), start=first):
                for spot in spots:
                    if spot is not None:
                        users[tables.firsts[spot[0]] + spot[1], rank].append(number)
                if copies:
                    for before in graph.before(action, (rank, number - first)) if action.op.host_bytes is None else ():
                        if before.op.host_bytes is not None:
                            users[tables.firsts[rank] + (graph.position(before, rank) or 0), rank].append(number)
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
                        if other != rank and (number, other) in users:  # no one needs it where owners step
                            tables._add(Message(action, rank, other, ticks(op, stage, rank, other),
                                                tuple(users[number, other]), 1), number)
                elif op.host_bytes is not None:  # the rank goes on while it is copied
                    copied = ratio(costs.host_link.transfer_s(op.host_bytes(costs.stages[stage])) * unit, 1)
                    tables._add(Message(action, rank, rank, copied, tuple(users.get((number, rank), ())), 1), number)
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
            yield None if op.seconds is None else ticks(op, stage, op.recomputes and (stage, index) not in recomputed)


def _seconds(kind: Kind, stage: int, costs: Costs) -> Number:
    assert kind.seconds is not None, "it takes time"
    seconds = costs.seconds.get((kind, stage))
    seconds = kind.seconds(costs.stages[stage]) if seconds is None else seconds
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
        times |= {cost.recompute_s, *(_seconds(kind, stage, costs) for kind in kinds if kind.seconds),
                  *(costs.host_link.transfer_s(kind.host_bytes(cost)) for kind in kinds if kind.host_bytes)}
    exact = not any(isinstance(time, float) for time in times)
    return lcm(*(Fraction(time).denominator for time in times)) if exact else 1
