"""Train several pipelines in the same processes in turns, a few updates at a time (round robin), and time each.

Other load of the machine then falls on all of them alike. All warm up before the first turn: else the first would pay
for what a process does once (loading kernels, the first large allocations). A pipeline without a flush stays full from
turn to turn. The first update of a turn finds the caches full of the others' data and does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

WARM_UP = 2
"""Updates of each before the turns: the first, which allocates, and one more."""

UPDATES = 4
"""Updates of a turn that count."""

MIN_UPDATES = WARM_UP + 2 * (1 + UPDATES) + 1
"""Updates of a run with two turns that count. The one in which a pipeline drains is not among them."""

Turn = tuple[float, ...]
"""Seconds of each update that counts."""

AnyTraining = TypeVar("AnyTraining", bound="TimedTraining")


@dataclass(eq=False)
class TimedTraining:
    """The training of one contender, in turns.

    Attributes:
        name: of the contender.
        steps: yields the loss of each update, until the last.
        updates: how many these will be; None if unknown.
        losses, update_s: of its updates so far.
        turns: in order, without the one in which it ended: a pipeline drains in it.
        seconds: in all, with the warm-up; as of the last turn.
        warmed_up: updates of the warm-up; 0 before its end.
        ended: whether it has made all of its updates.
    """

    name: str
    steps: Iterator[float]
    updates: int | None = None
    losses: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    warmed_up: int = 0
    ended: bool = False

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Make the updates before the first turn."""
        self._run_updates(WARM_UP, clock)
        self.warmed_up = len(self.losses)

    def take_turn(self, updates: int, clock: Callable[[], float]) -> None:
        """Make one update that does not count, then ``updates`` that do."""
        first = len(self.losses) + 1
        self._run_updates(1 + updates, clock)
        if not self.ended:
            self.turns.append(tuple(self.update_s[first:]))

    def _run_updates(self, updates: int, clock: Callable[[], float]) -> None:
        """Make at most ``updates``; end with the last one, not in a turn of its own."""
        begun = started = clock()
        for _ in range(updates):
            loss = next(self.steps, None)
            if loss is None:
                self.ended = True
                break
            self.losses.append(loss)
            now = clock()
            self.update_s.append(now - started)
            started = now
        if not self.ended and len(self.losses) == self.updates:
            self.ended = next(self.steps, None) is None
        self.seconds += clock() - begun

    @property
    def counted(self) -> tuple[Turn, ...]:
        """The turns. Of a run too short for one: all updates after the warm-up as one turn, if there are any."""
        rest = tuple(self.update_s[self.warmed_up:])
        return tuple(self.turns) or ((rest,) if rest else ())


def take_turns(trainings: Sequence[AnyTraining], barrier: Callable[[], None], clock: Callable[[], float],
               show: Callable[[AnyTraining], None], updates: int = UPDATES) -> None:
    """Warm up all trainings, then let them take turns until each has ended.

    Args:
        trainings: the same on every rank, in the same order.
        barrier: returns when all ranks have called it.
        clock: seconds.
        show: called after every turn, and after each one's warm-up.
        updates: of a turn that count.
    """
    for training in trainings:
        barrier()
        training.warm_up(clock)
        show(training)
    while not all(training.ended for training in trainings):
        for training in trainings:
            if not training.ended:
                barrier()
                training.take_turn(updates, clock)
                show(training)
