"""Tabulate a schedule for the simulator: numbered actions, their times, and the messages between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import lcm

from vpipe.schedules.action import COMPLETES, PER_MICROBATCH, RETURNS, SENDS, Action, Op
from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.dependencies import borrowing_ranks
from vpipe.schedules.lower import VersionsUsed, add_transfers
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import recomputations

_NEIGHBOUR: dict[Op, tuple[Op, int, tuple[Op, ...]]] = {
    Op.SEND_F: (Op.RECV_F, 1, (Op.FORWARD,)),
    Op.SEND_B: (Op.RECV_B, -1, (Op.BACKWARD, Op.INPUT)),
}
"""The receive of a send, its stage seen from the send's, and the operations that wait for it."""

_LOWERED = SENDS | {Op.REDUCE}
"""Operations that no compute-only schedule has."""


@dataclass(slots=True)
class Message:
    """A message from one action to others.

    Attributes:
        action: the send; or a norm, which reaches every step at once; or a sum over replicas, both for the gradients
            that go into it and for its result.
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
        schedule: the lowered schedule.
        unit: ticks per second. Times are whole numbers of ticks, which are many times faster than fractions; with a
            ``float`` among the costs a tick is a second and times stay as they are.
        firsts: per rank, the number of its first action.
        ends: per rank, the number behind its last.
        rank_of: per action, its rank.
        ticks: per action, the ticks that it takes; None when it takes no time of its rank.
        messages: everything that is sent or published.
        opened: by action, the messages that it opens, as their send, norm or receive, as the last of a replica's
            gradients, or as its sum.
    """

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
        posted = not any(action.op in _LOWERED for program in schedule.programs for action in program)
        if posted:
            schedule = add_transfers(schedule)
        widths = [len(ranks) for ranks in schedule.placement]
        unit = _ticks_per_second(costs, widths)
        sizes = [len(program) for program in schedule.programs]
        ends = [sum(sizes[:rank + 1]) for rank in range(len(sizes))]
        tables = cls(schedule, unit, [end - size for end, size in zip(ends, sizes, strict=True)], ends,
                     [rank for rank, size in enumerate(sizes) for _ in range(size)],
                     list(_ticks(schedule, costs, unit)))

        @cache
        def ticks(op: Op, stage: int, source: int, target: int) -> Number:
            cost = costs.stages[stage]
            size = (ratio(cost.reduce_bytes, widths[stage]) if op is Op.REDUCE else
                    {Op.SEND_F: cost.output_bytes, Op.SEND_B: cost.gradient_bytes}.get(op, cost.tied_bytes))
            return 0 if source == target else ratio(costs.link(source, target).transfer_s(size) * unit, 1)

        numbers = _Numbers(schedule, tables.firsts)
        for rank, (first, program) in enumerate(zip(tables.firsts, schedule.programs, strict=True)):
            for number, action in enumerate(program, start=first):
                op, stage = action.op, action.stage
                if op in SENDS:
                    for receive, users in numbers.receives(action, rank):
                        target = tables.rank_of[receive]
                        tables._add(Message(action, rank, target, ticks(op, stage, rank, target), users,
                                            1 if posted else 2), number, *(() if posted else (receive,)))
                elif op is Op.REDUCE:
                    for other, made, summed in numbers.replicas(action, rank):
                        if made is not None:
                            tables._add(Message(action, other, rank, ticks(op, stage, other, rank), (number,), 1), made)
                        tables._add(Message(action, rank, other, ticks(op, stage, rank, other), summed, 1), number)
                elif op is Op.NORM and rank == schedule.placement[stage][0]:  # the stage's other ranks have the same
                    tables._add(Message(action, rank, rank, 0, tuple(numbers.steps(action)), 1), number)
        return tables

    def _add(self, message: Message, *openers: int) -> None:
        for opener in openers:
            self.opened[opener] = (*self.opened.get(opener, ()), len(self.messages))
        self.messages.append(message)


class _Numbers:
    """Find the numbers of actions.

    A key is (stage, index); for operations that may stand on several ranks, because the stage is replicated or its
    weights are borrowed, (stage, index, rank).
    """

    def __init__(self, schedule: Schedule, firsts: Sequence[int]) -> None:
        self._schedule = schedule
        self._where: dict[Op, dict[tuple[int, ...], int]] = {op: {} for op in Op}
        several = {op: op not in PER_MICROBATCH for op in Op}
        self._last: dict[tuple[int, int, int], int] = {}  # of a replica's gradients of an update: (stage, update, rank)
        spans = {stage: schedule.rounds.per_update(stage) for stage in range(schedule.stages)
                 if schedule.rounds.width(stage) > 1}
        for rank, (first, program) in enumerate(zip(firsts, schedule.programs, strict=True)):
            for number, action in enumerate(program, start=first):
                key = action.stage, action.microbatch
                self._where[action.op][(*key, rank) if several[action.op] else key] = number
                if spans and action.op in COMPLETES and action.stage in spans:
                    self._last[action.stage, action.microbatch // spans[action.stage], rank] = number
        self._users: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # of tied versions, by borrowing rank
        for owner, borrowers in schedule.ties.items():
            used = {rank: VersionsUsed(owner, iter(schedule.programs[rank])) for rank in schedule.placement[owner]}
            for microbatch in range(schedule.microbatches):
                version = used[schedule.rounds.rank_of(owner, microbatch)].of(microbatch)
                for stage in borrowers:
                    user = self._where[Op.FORWARD][stage, microbatch]
                    self._users[owner, version, schedule.rounds.rank_of(stage, microbatch)].append(user)

    def _of(self, operations: Iterable[Op], *key: int) -> tuple[int, ...]:
        """Return those of the ``operations`` that exist."""
        return tuple([self._where[op][key] for op in operations if key in self._where[op]])

    def steps(self, norm: Action) -> Iterator[int]:
        """Yield the steps that wait for a norm: those on other ranks than its stage's, which have it themselves."""
        own = self._schedule.placement[norm.stage]
        for stage, ranks in enumerate(self._schedule.placement):
            for rank in ranks:
                if rank not in own:
                    yield from self._of((Op.STEP,), stage, norm.microbatch, rank)

    def replicas(self, reduce: Action, rank: int) -> Iterator[tuple[int, int | None, tuple[int, ...]]]:
        """Yield for every other replica its rank, its last gradient if it has any, and what waits for the sum."""
        stage, update = reduce.stage, reduce.microbatch
        for other in self._schedule.placement[stage]:
            if other != rank:
                yield other, self._last.get((stage, update, other)), self._of((Op.NORM, Op.STEP), stage, update, other)

    def receives(self, send: Action, rank: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield for every rank that receives ``send`` the receive, and what waits for it."""
        stage, index, schedule = send.stage, send.microbatch, self._schedule
        if (neighbour := _NEIGHBOUR.get(send.op)) is not None:
            receiving, offset, users = neighbour
            there = self._where[receiving].get((stage + offset, index))
            if there is not None:
                yield there, self._of(users, stage + offset, index)
        elif send.op is Op.SEND_W:
            for target in borrowing_ranks(schedule.placement, stage, schedule.ties.get(stage, ()), rank):
                for receive in self._of((Op.RECV_W,), stage, index, target):
                    yield receive, tuple(self._users.get((stage, index, target), ()))
        else:
            for target in schedule.placement[stage]:
                for receive in self._of((Op.RECV_G,), stage, index, target):
                    yield receive, self._of((Op.NORM, Op.STEP), stage, index, target)


def _ticks(schedule: Schedule, costs: Costs, unit: int) -> Iterator[Number | None]:
    """Yield the ticks of each action, rank after rank; None when it takes no time of its rank."""
    times: dict[tuple[Op, int], Number] = {}
    alone: dict[tuple[Op, int], Number] = {}  # of backwards that recompute by themselves
    for stage, cost in enumerate(costs.stages):
        for op, time in ((Op.FORWARD, cost.forward_s), (Op.BACKWARD, cost.input_s + cost.weight_s),
                         (Op.INPUT, cost.input_s), (Op.WEIGHT, cost.weight_s), (Op.RECOMPUTE, cost.recompute_s),
                         (Op.STEP, cost.step_s)):
            times[op, stage] = ratio(time * unit, 1)  # an int for a whole number, unless it is a float
            alone[op, stage] = ratio((time + cost.recompute_s) * unit, 1)
    for program in schedule.programs:
        recomputed = recomputations(program)
        for action in program:
            key = action.op, action.stage
            if action.op in RETURNS and (action.stage, action.microbatch) not in recomputed:
                yield alone[key]
            else:
                yield times.get(key)


def _ticks_per_second(costs: Costs, widths: Sequence[int]) -> int:
    """Return the fewest that make every time a whole number of ticks; 1 with a ``float`` among them."""
    times: set[Number] = set()
    for cost, width in set(zip(costs.stages, widths, strict=True)):
        times |= {cost.forward_s, cost.input_s, cost.weight_s, cost.recompute_s, cost.step_s}
        times |= {link.transfer_s(size) for link in {costs.default_link, *costs.links.values()}
                  for size in (cost.output_bytes, cost.gradient_bytes, cost.tied_bytes,
                               ratio(cost.reduce_bytes, width))}
    exact = not any(isinstance(time, float) for time in times)
    return lcm(*(Fraction(time).denominator for time in times)) if exact else 1
