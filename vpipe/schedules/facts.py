"""What a stage holds while its program runs: activations, weight versions, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vpipe.schedules.action import Action, Op
from vpipe.schedules.order import Schedule


@dataclass(frozen=True, slots=True)
class Load:
    """What a stage holds when it has executed the action at ``position``.

    Attributes:
        position: in the program of its rank.
        activations: microbatches between their forward and their backward.
        versions: weight versions, the latest and those that these microbatches use.
        staleness: at a backward, latest version - version used; otherwise 0.
    """

    position: int
    activations: int
    versions: int
    staleness: int


def loads(program: Sequence[Action], stage: int) -> Iterator[Load]:
    """What ``stage`` holds after each forward, backward and step of its rank's program, counted from its STEPs."""
    latest = 0
    pinned: dict[int, int] = {}  # version by microbatch in flight
    users: Counter[int] = Counter()  # microbatches in flight by version
    for position, action in enumerate(program):
        if action.stage != stage or action.op not in (Op.FORWARD, Op.BACKWARD, Op.STEP):
            continue
        staleness = 0
        if action.op is Op.FORWARD:
            pinned[action.microbatch] = latest
            users[latest] += 1
        elif action.op is Op.BACKWARD:
            used = pinned.pop(action.microbatch)
            staleness = latest - used
            users[used] -= 1
            if not users[used]:
                del users[used]
        else:
            latest += 1
        yield Load(position, len(pinned), len(users) + (latest not in users), staleness)


@dataclass(frozen=True)
class StageFacts:
    """The most that a stage ever holds.

    Attributes:
        peak_activations: microbatches whose activations it holds at once.
        versions: weight versions it holds at once.
        staleness: latest version - version used, at a backward.
    """

    peak_activations: int
    versions: int
    staleness: int


def facts(schedule: Schedule) -> tuple[StageFacts, ...]:
    """Per stage, what its program holds at most; ``schedule`` must have passed :func:`~vpipe.schedules.check.check`."""
    held = [list(loads(schedule.programs[ranks[0]], stage)) for stage, ranks in enumerate(schedule.placement)]
    return tuple(StageFacts(max(load.activations for load in stage),
                            max(load.versions for load in stage),
                            max(load.staleness for load in stage)) for stage in held)
