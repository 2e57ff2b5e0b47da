"""A schedule as the simulator's tables: numbered actions, what each takes, and what is on its way between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import chain
from math import lcm

from vpipe.schedules.action import RETURNS, SENDS, Action, Op
from vpipe.schedules.lower import Lowering, VersionsUsed
from vpipe.schedules.order import Schedule
from vpipe.schedules.simulation.costs import Costs, Number, ratio
from vpipe.schedules.simulation.timeline import recomputations


@dataclass(slots=True)
class Way:
    """Something on its way from one action to others.

    Attributes:
        action: the send; or a norm, which is with every step at once.
        source: its rank.
        target: the rank of its receive; ``source`` when no link is used.
        ticks: that it takes.
        users: the numbers of the actions that wait for it.
        opens: how many actions must be reached before it starts: the send, and the receive unless that waits already.
    """

    action: Action
    source: int
    target: int
    ticks: Number
    users: tuple[int, ...]
    opens: int


@dataclass(frozen=True)
class Tables:
    """A lowered schedule, its actions numbered rank after rank.

    Attributes:
        schedule: the lowered one.
        unit: ticks per second. Times are whole numbers of ticks, which are many times faster than fractions; with a
            ``float`` among the costs a tick is a second and times stay as they are.
        firsts: per rank, the number of its first action.
        ends: per rank, the number behind its last.
        rank_of: per action, its rank.
        ticks: per action, what it takes; None when it is passed at once.
        ways: all that is sent or published.
        opened: by action, the ways that it opens as their send, norm or receive.
    """

    schedule: Schedule
    unit: int
    firsts: list[int]
    ends: list[int]
    rank_of: list[int]
    ticks: list[Number | None]
    ways: list[Way] = field(default_factory=list)
    opened: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> Tables:
        """The tables of ``schedule``, compute-only (then its receives wait from the beginning) or lowered."""
        posted = not any(action.op in SENDS for program in schedule.programs for action in program)
        if posted:
            schedule = _with_sends(schedule)
        unit = _ticks_per_second(costs)
        sizes = [len(program) for program in schedule.programs]
        ends = [sum(sizes[:rank + 1]) for rank in range(len(sizes))]
        tables = cls(schedule, unit, [end - size for end, size in zip(ends, sizes, strict=True)], ends,
                     [rank for rank, size in enumerate(sizes) for _ in range(size)],
                     list(_ticks(schedule, costs, unit)))
        tables._fill(costs, posted)
        return tables

    def _fill(self, costs: Costs, posted: bool) -> None:
        """Add the ways."""
        schedule, numbers = self.schedule, _Numbers(self.schedule, self.firsts)

        @cache
        def ticks(op: Op, stage: int, source: int, target: int) -> Number:
            cost = costs.stages[stage]
            size = {Op.SEND_F: cost.output_bytes, Op.SEND_B: cost.gradient_bytes}.get(op, cost.tied_bytes)
            return 0 if source == target else _whole(costs.link(source, target).transfer_s(size) * self.unit)

        for rank, (first, program) in enumerate(zip(self.firsts, schedule.programs, strict=True)):
            for number, action in enumerate(program, start=first):
                if action.op is Op.NORM:
                    steps = [numbers.of(stage, action.microbatch, (Op.STEP,)) for stage in range(schedule.stages)]
                    self._add(Way(action, rank, rank, 0, tuple(chain(*steps)), 1), number)
                elif action.op in SENDS:
                    for receive, users in numbers.receives(action):
                        target = self.rank_of[receive]
                        taken = ticks(action.op, action.stage, rank, target)
                        self._add(Way(action, rank, target, taken, users, 1 if posted else 2),
                                  number, *(() if posted else (receive,)))

    def _add(self, way: Way, *openers: int) -> None:
        for opener in openers:
            self.opened[opener] = (*self.opened.get(opener, ()), len(self.ways))
        self.ways.append(way)


class _Numbers:
    """Finds the numbers of actions.

    A key is (stage, index); of the receives of a tied version, which stand on several ranks, (owner, version, rank).
    """

    def __init__(self, schedule: Schedule, firsts: Sequence[int]) -> None:
        self._where: dict[Op, dict[tuple[int, ...], int]] = {op: {} for op in Op}
        for rank, (first, program) in enumerate(zip(firsts, schedule.programs, strict=True)):
            for number, action in enumerate(program, start=first):
                key = action.stage, action.microbatch
                self._where[action.op][(*key, rank) if action.op is Op.RECV_W else key] = number
        self._borrowers = {owner: {schedule.placement[stage][0] for stage in borrowers}
                           for owner, borrowers in schedule.ties.items()}
        self._users: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # of tied versions
        for owner, borrowers in schedule.ties.items():
            used = VersionsUsed(owner, iter(schedule.programs[schedule.placement[owner][0]]))
            for microbatch in range(schedule.microbatches):
                version = used.of(microbatch)
                for stage in borrowers:
                    user = self._where[Op.FORWARD][stage, microbatch]
                    self._users[owner, version, schedule.placement[stage][0]].append(user)

    def of(self, stage: int, index: int, operations: tuple[Op, ...]) -> tuple[int, ...]:
        """Those of the ``operations`` that there are."""
        key = stage, index
        return tuple([self._where[op][key] for op in operations if key in self._where[op]])

    def receives(self, send: Action) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Of everyone who receives ``send``: the receive, and what waits for it."""
        stage, index = send.stage, send.microbatch
        if send.op is Op.SEND_W:
            for rank in self._borrowers.get(stage, ()):
                if (version := self._where[Op.RECV_W].get((stage, index, rank))) is not None:
                    yield version, tuple(self._users.get((stage, index, rank), ()))
            return
        receive, offset, users = _OTHER_END[send.op]
        there = self._where[receive].get((stage + offset, index))
        if there is not None:
            yield there, self.of(stage + offset, index, users)


_OTHER_END: dict[Op, tuple[Op, int, tuple[Op, ...]]] = {
    Op.SEND_F: (Op.RECV_F, 1, (Op.FORWARD,)),
    Op.SEND_B: (Op.RECV_B, -1, (Op.BACKWARD, Op.INPUT)),
    Op.SEND_G: (Op.RECV_G, 0, (Op.NORM, Op.STEP)),
}
"""The receive of a send, its stage seen from the send's, and the operations that wait for it."""


def _with_sends(schedule: Schedule) -> Schedule:
    """Lowered, for the sends in it; where its receives stand makes no difference here."""
    def compute(rank: int) -> Iterator[Action]:
        return iter(schedule.programs[rank])

    return schedule.with_programs([
        tuple(Lowering(schedule.placement, rank, compute, schedule.update_every, schedule.ties).program())
        for rank in range(schedule.ranks)])


def _ticks(schedule: Schedule, costs: Costs, unit: int) -> Iterator[Number | None]:
    """What each action takes, rank after rank; None when it is passed at once."""
    times: dict[tuple[Op, int], Number] = {}
    alone: dict[tuple[Op, int], Number] = {}  # of backwards that recompute by themselves
    for stage, cost in enumerate(costs.stages):
        for op, time in ((Op.FORWARD, cost.forward_s), (Op.BACKWARD, cost.input_s + cost.weight_s),
                         (Op.INPUT, cost.input_s), (Op.WEIGHT, cost.weight_s), (Op.RECOMPUTE, cost.recompute_s),
                         (Op.STEP, cost.step_s)):
            times[op, stage] = _whole(time * unit)
            alone[op, stage] = _whole((time + cost.recompute_s) * unit)
    for program in schedule.programs:
        recomputed = recomputations(program)
        for action in program:
            key = action.op, action.stage
            if action.op in RETURNS and (action.stage, action.microbatch) not in recomputed:
                yield alone[key]
            else:
                yield times.get(key)


def _ticks_per_second(costs: Costs) -> int:
    """The fewest that make every time a whole number of ticks; 1 with a ``float`` among them."""
    times: set[Number] = set()
    for cost in set(costs.stages):
        times |= {cost.forward_s, cost.input_s, cost.weight_s, cost.recompute_s, cost.step_s}
        times |= {link.transfer_s(size) for link in {costs.default_link, *costs.links.values()}
                  for size in (cost.output_bytes, cost.gradient_bytes, cost.tied_bytes)}
    exact = not any(isinstance(time, float) for time in times)
    return lcm(*(Fraction(time).denominator for time in times)) if exact else 1


def _whole(ticks: Number) -> Number:
    """As an ``int`` where it is a whole number, unless it is a ``float``."""
    return ratio(ticks, 1)
