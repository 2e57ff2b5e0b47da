"""Follow what a program uses and holds, action by action: weight versions, activations, weight halves, and their size.

What an action takes, leaves and frees stands in the row of its kind (:mod:`vpipe.schedules.kinds`). A step makes the
next weight version, and a USE chooses the one that the following forwards use. Without any that is the latest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from vpipe.schedules.action import Action
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.costs import Costs, Number
from vpipe.schedules.kinds import KEPT, RECOMPUTED, UPDATED, Needed, Value

Size = Callable[[Value, int, int], Number]
"""The size of a value of a stage and an index while it is held."""

_REMEMBERED = 4096
"""Microbatches whose versions are remembered: far more than are ever in flight."""


@dataclass(slots=True)
class VersionRegister:
    """The versions of a stage on one rank: the number of the latest, 0 at first, and the chosen one."""

    latest: int = 0
    chosen: int | None = None

    @property
    def in_use(self) -> int:
        return self.latest if self.chosen is None else self.chosen

    def follow(self, action: Action) -> None:
        if action.op.makes_version:
            self.latest += 1
        elif action.op.chooses:
            self.chosen = action.index


def versions_used(program: Iterable[Action]) -> Iterator[tuple[int, int, int]]:
    """Yield the stage and microbatch of every forward, with the weight version that it uses."""
    registers: dict[int, VersionRegister] = defaultdict(VersionRegister)
    for action in program:
        if action.op.uses_version:
            yield action.stage, action.index, registers[action.stage].in_use
        elif action.op.touches_versions:
            registers[action.stage].follow(action)


class StreamVersions:
    """Look up the versions that microbatches use in programs that are read no further than necessary.

    Args:
        compute: returns the compute program of a rank, from its beginning.
    """

    def __init__(self, assignment: Assignment, compute: Callable[[int], Iterable[Action]]) -> None:
        self._assignment, self._compute = assignment, compute
        self._coming: dict[int, Iterator[tuple[int, int, int]]] = {}  # by rank
        self._used: dict[tuple[int, int], int] = {}  # by stage and microbatch

    def of(self, stage: int, microbatch: int) -> int:
        """Return the version that the forward of a microbatch uses."""
        rank = self._assignment.rank_of(stage, microbatch)
        while (stage, microbatch) not in self._used:
            if rank not in self._coming:
                self._coming[rank] = versions_used(self._compute(rank))
            other, number, version = next(self._coming[rank])
            self._used[other, number] = version
            if len(self._used) > _REMEMBERED:
                del self._used[next(iter(self._used))]
        return self._used[stage, microbatch]


@dataclass(frozen=True)
class RankPeaks:
    """The most that a rank ever holds."""

    peak_activations: int  # microbatch-stages between their forward and the passing of their gradient (B or I)
    peak_weight_halves: int  # microbatch-stages between their I and their W


@dataclass(frozen=True)
class StagePeaks:
    """The most that a stage ever holds; see :func:`stage_loads`."""

    versions: int
    staleness: int

    @classmethod
    def of(cls, programs: Iterable[Sequence[Action]], stage: int, frozen: int = 0) -> StagePeaks:
        loads = [load for program in programs for _, *load in stage_loads(program, stage, frozen)]
        return cls(*map(max, zip(*loads, strict=True)))


def stage_loads(program: Iterable[Action], stage: int, frozen: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield the position of each forward, backward, half, step and USE of ``stage``, its versions, and its staleness.

    The weight versions are those from the one in use to the latest, since a later forward may use any of them, and
    those that microbatches in flight use; each of the ``frozen`` stages in front needs no version beyond the forward.
    The staleness is latest version - version used when a gradient passes; otherwise 0.
    """
    register = VersionRegister()
    pinned: dict[int, int] = {}  # version by microbatch in flight
    users: Counter[int] = Counter()  # microbatches in flight by version
    for position, action in enumerate(program):
        op, own, microbatch = action
        if own != stage or not op.touches_versions:
            continue
        staleness = 0
        if op.uses_version:
            if stage >= frozen:
                pinned[microbatch] = register.in_use
                users[register.in_use] += 1
        else:
            register.follow(action)
        if op.returns:
            staleness = register.latest - pinned[microbatch]
        if op.completes:
            used = pinned.pop(microbatch)
            users[used] -= 1
            if not users[used]:
                del users[used]
        oldest = register.in_use
        older = len(users) - (oldest in users)  # versions are used in order
        yield position, register.latest - oldest + 1 + older, staleness


def recomputations(program: Sequence[Action]) -> set[tuple[int, int]]:
    """Return (stage, microbatch) of everything that ``program`` recomputes before the backward."""
    return {(action.stage, action.index) for action in program
            if action.op.memory is not None and RECOMPUTED in action.op.memory.takes}


def count_of(*values: Value) -> Size:
    """Return a size function that counts some values."""
    return lambda value, stage, index: value in values


def peak(program: Iterable[Action], *values: Value, frozen: int = 0) -> int:
    """Return the most values of these that a rank holds at once; see :func:`moments`."""
    return int(max(moment.size for moment in moments(program, count_of(*values), frozen)))


def bytes_in(program: Sequence[Action], costs: Costs) -> Size:
    """Return a size function for the bytes of what a program holds."""
    early, recomputing = recomputations(program), [replace(cost, recompute_s=1) for cost in costs.stages]

    @cache
    def size(value: Value, stage: int, is_early: bool) -> Number:
        number = value.bytes((recomputing if is_early else costs.stages)[stage])
        return Fraction(number) if isinstance(number, float) else number  # so that running sums come back to 0

    return lambda value, stage, index: size(value, stage, (stage, index) in early)


class Moment(NamedTuple):
    """What a rank holds once an action has changed it.

    Attributes:
        position: of the action in the program, -1 at the beginning.
        at_start: it is the start of the action: a forward and a recomputation, also one within a backward, take memory
            as they start.
        held: how many there are of each value of a stage and an index; until the next moment.
        size: of all of them.
    """

    position: int
    at_start: bool
    held: Mapping[Needed, int]
    size: Number


def moments(program: Iterable[Action], size: Size, frozen: int = 0, versions: Iterable[int] = ()) -> Iterator[Moment]:
    """Yield what a rank holds at the beginning, and whenever an action may change it.

    The ``frozen`` stages in front of the pipeline save nothing. The weight versions of the stages in ``versions`` count
    as so many of :data:`~vpipe.schedules.kinds.UPDATED` at index 0.
    """
    held = {(UPDATED, stage, 0): 1 for stage in versions}
    counts = {position: count for _, stage, _ in held for position, count, _ in stage_loads(program, stage, frozen)}
    total: Number = sum(size(*key) for key in held)
    yield Moment(-1, True, held, total)
    waiting: dict[int, Needed] = {}  # by index
    for position, (op, stage, index) in enumerate(program):
        changes = dict[Needed, int]()
        if op.uses_version:
            if index in waiting:
                changes[waiting.pop(index)] = 0
            if size(KEPT, stage, index):
                waiting[index] = KEPT, stage, index
                changes[KEPT, stage, index] = 1
        memory = op.memory if stage >= frozen else None
        if stage >= frozen and position in counts:
            changes[UPDATED, stage, 0] = counts[position]
        if memory is not None:
            changes |= {(value, stage, index): 1 for value in memory.takes + memory.leaves}
            changes |= {(value, stage, index): 0 for value in memory.frees}
        if not changes:
            continue
        again = RECOMPUTED, stage, index
        if op.returns and again not in held and (more := size(*again)):
            held[again] = 1
            total += more
            yield Moment(position, True, held, total)
        for key, count in changes.items():
            total += (count - held.pop(key, 0)) * size(*key)
            if count:
                held[key] = count
        yield Moment(position, op.memory is not None and bool(op.memory.takes), held, total)


def peak_contents(program: Sequence[Action], stages: Sequence[int], costs: Costs,
                  frozen: int = 0) -> Counter[tuple[Value, int]]:
    """Return how many values of each stage a rank holds at the first moment when it holds most bytes."""
    most: Number = -1
    fullest: Mapping[Needed, int] = {}
    for moment in moments(program, bytes_in(program, costs), frozen, stages):
        if moment.size > most:
            most, fullest = moment.size, dict(moment.held)
    return Counter((value, stage) for (value, stage, _), count in fullest.items() for _ in range(count))
