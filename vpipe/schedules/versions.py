"""Follow which version of its weights each forward of a stage uses.

A step makes the next version, and a USE chooses the one that the following forwards use. Without any it is the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vpipe.schedules.action import Action
from vpipe.schedules.assignment import Assignment

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
        """Take note of an action of the stage."""
        if action.op.makes_version:
            self.latest += 1
        elif action.op.chooses:
            self.chosen = action.index


def versions_used(stage: int, program: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """Yield every microbatch that a program takes through a stage, with the version that its forward uses."""
    register = VersionRegister()
    for action in program:
        if action.stage == stage:
            if action.op.uses_version:
                yield action.index, register.in_use
            register.follow(action)


class StreamVersions:
    """Look up the versions that microbatches use in programs that are read no further than necessary.

    Args:
        compute: returns the compute program of a rank, from its beginning.
    """

    def __init__(self, assignment: Assignment, compute: Callable[[int], Iterable[Action]]) -> None:
        self._assignment, self._compute = assignment, compute
        self._coming: dict[tuple[int, int], Iterator[tuple[int, int]]] = {}  # by stage and rank
        self._used: dict[tuple[int, int], int] = {}  # by stage and microbatch

    def of(self, stage: int, microbatch: int) -> int:
        """Return the version that the forward of a microbatch uses."""
        place = stage, self._assignment.rank_of(stage, microbatch)
        while (stage, microbatch) not in self._used:
            if place not in self._coming:
                self._coming[place] = versions_used(stage, self._compute(place[1]))
            number, version = next(self._coming[place])
            self._used[stage, number] = version
            if len(self._used) > _REMEMBERED:
                del self._used[next(iter(self._used))]
        return self._used[stage, microbatch]
