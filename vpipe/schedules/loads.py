"""Count what a program holds: activations, weight halves, weight versions, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vpipe.schedules.action import Action
from vpipe.schedules.kinds import RECOMPUTED
from vpipe.schedules.versions import VersionRegister


class RankLoad(NamedTuple):
    """The contents of a rank after the action at ``position`` of its program.

    Attributes:
        activations: microbatch-stages between their forward and the passing of their gradient (B or I).
        weight_halves: microbatch-stages between their I and their W.
    """

    position: int
    activations: int
    weight_halves: int


class StageLoad(NamedTuple):
    """The contents of a stage after the action at ``position`` of its rank's program.

    Attributes:
        versions: weight versions: those from the one in use to the latest, since a later forward may use any of
            them, and those that microbatches in flight use.
        staleness: when a gradient passes, latest version - version used; otherwise 0.
    """

    position: int
    versions: int
    staleness: int


def rank_loads(program: Sequence[Action], frozen: int = 0) -> Iterator[RankLoad]:
    """Yield what a rank holds after each action that takes or frees memory; ``frozen`` stages in front keep nothing."""
    activations = halves = 0
    for position, action in enumerate(program):
        more = action.op.more_held
        if more != (0, 0) and action.stage >= frozen:
            activations, halves = activations + more[0], halves + more[1]
            yield RankLoad(position, activations, halves)


def stage_loads(program: Sequence[Action], stage: int, frozen: int = 0) -> Iterator[StageLoad]:
    """Yield what ``stage`` holds after each forward, backward, half, step and USE of its rank's program.

    Each of the ``frozen`` stages in front needs no version beyond the forward.
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
        yield StageLoad(position, register.latest - oldest + 1 + older, staleness)


@dataclass(frozen=True)
class RankPeaks:
    """The most that a rank ever holds; see :class:`RankLoad`."""

    peak_activations: int
    peak_weight_halves: int


@dataclass(frozen=True)
class StagePeaks:
    """The most that a stage ever holds: see :class:`StageLoad`."""

    versions: int
    staleness: int


def recomputations(program: Sequence[Action]) -> set[tuple[int, int]]:
    """Return (stage, microbatch) of everything that ``program`` recomputes before the backward."""
    return {(action.stage, action.index) for action in program
            if action.op.memory is not None and RECOMPUTED in action.op.memory.takes}
