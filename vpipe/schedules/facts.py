"""What a schedule holds: activations, weight versions, staleness, counted from its programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vpipe.schedules.action import COMPLETES, RETURNS, Action, Op
from vpipe.schedules.order import Schedule


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank holds when it has executed the action at ``position``.

    Attributes:
        position: in its program.
        activations: microbatch-stages between their forward and the passing of their gradient (B or I).
        weight_halves: microbatch-stages between their I and their W.
    """

    position: int
    activations: int
    weight_halves: int


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a stage holds when its rank has executed the action at ``position``.

    Attributes:
        position: in the program of its rank.
        versions: weight versions: those from the one in use to the latest, since a later forward may use any of
            them, and those that microbatches in flight use.
        staleness: when a gradient passes, latest version - version used; otherwise 0.
    """

    position: int
    versions: int
    staleness: int


def rank_loads(program: Sequence[Action]) -> Iterator[RankLoad]:
    """What a rank holds after each of its forwards, backwards and halves."""
    activations = halves = 0
    for position, action in enumerate(program):
        if action.op is Op.FORWARD:
            activations += 1
        elif action.op is Op.WEIGHT:
            halves -= 1
        elif action.op in RETURNS:
            activations -= 1
            halves += action.op is Op.INPUT
        else:
            continue
        yield RankLoad(position, activations, halves)


def stage_loads(program: Sequence[Action], stage: int) -> Iterator[StageLoad]:
    """What ``stage`` holds after each forward, backward, half, step and USE of its rank's program."""
    latest = 0
    chosen: int | None = None  # what a USE said
    pinned: dict[int, int] = {}  # version by microbatch in flight
    users: Counter[int] = Counter()  # microbatches in flight by version
    for position, action in enumerate(program):
        if action.stage != stage:
            continue
        staleness = 0
        if action.op is Op.FORWARD:
            version = latest if chosen is None else chosen
            pinned[action.microbatch] = version
            users[version] += 1
        elif action.op is Op.STEP:
            latest += 1
        elif action.op is Op.USE:
            chosen = action.microbatch
        elif action.op not in RETURNS and action.op not in COMPLETES:
            continue
        if action.op in RETURNS:
            staleness = latest - pinned[action.microbatch]
        if action.op in COMPLETES:
            used = pinned.pop(action.microbatch)
            users[used] -= 1
            if not users[used]:
                del users[used]
        oldest = latest if chosen is None else chosen
        yield StageLoad(position, latest - oldest + 1 + sum(version < oldest for version in users), staleness)


@dataclass(frozen=True)
class RankFacts:
    """The most that a rank ever holds: see :class:`RankLoad`."""

    peak_activations: int
    peak_weight_halves: int


@dataclass(frozen=True)
class StageFacts:
    """The most that a stage ever holds: see :class:`StageLoad`."""

    versions: int
    staleness: int


def rank_facts(schedule: Schedule) -> tuple[RankFacts, ...]:
    """Per rank, what its program holds at most; ``schedule`` must have passed :func:`~vpipe.schedules.check.check`."""
    held = [list(rank_loads(program)) for program in schedule.programs]
    return tuple(RankFacts(max(load.activations for load in rank), max(load.weight_halves for load in rank))
                 for rank in held)


def stage_facts(schedule: Schedule) -> tuple[StageFacts, ...]:
    """Per stage, what it holds at most; ``schedule`` must have passed :func:`~vpipe.schedules.check.check`."""
    held = [[load for rank in ranks for load in stage_loads(schedule.programs[rank], stage)]
            for stage, ranks in enumerate(schedule.placement)]
    return tuple(StageFacts(max(load.versions for load in stage), max(load.staleness for load in stage))
                 for stage in held)
