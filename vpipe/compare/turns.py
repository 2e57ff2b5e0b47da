"""Turns: several pipelines live in the same processes and train one after the other, a few updates at a time.

So whatever else the machine does falls on all of them alike. Before anybody's turn all of them warm up: what a process
does once (loading kernels, the first large allocations) would else fall on whoever is first. A pipeline without a flush
stays full from turn to turn; the first update of a turn, which finds the caches full of the others' data, does not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

WARM_UP = 2
"""Updates of every contender before the turns: the first, which allocates, and one more."""

UPDATES = 4
"""Of a turn that count."""

NEEDED = WARM_UP + 2 * (1 + UPDATES) + 1
"""Updates of a run with two turns that count: the one in which a pipeline runs empty is not among them."""


@dataclass(frozen=True)
class Turn:
    """Some updates one after the other.

    Attributes:
        updates: how many; not the one that the turn began with.
        seconds: that they took.
    """

    updates: int
    seconds: float


@dataclass
class Course:
    """What a contender has done so far.

    Attributes:
        name: whose.
        steps: yields the loss of one update after the other, until it has made all.
        updates: how many these will be; None when nobody knows.
        losses: of its updates.
        turns: whole ones, in order; not the one in which it ended, since a pipeline runs empty in it.
        seconds: in all, with the warm-up.
        warmed: updates of the warm-up, and what they took.
        ended: whether it has made all of its updates.
    """

    name: str
    steps: Iterator[float]
    updates: int | None = None
    losses: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    warmed: Turn = Turn(0, 0.0)
    ended: bool = False

    def warm(self, clock: Callable[[], float]) -> None:
        """Updates before the first turn, which do not count."""
        begun = clock()
        made = self._make(WARM_UP)
        self._finish()
        self.seconds = clock() - begun
        self.warmed = Turn(made, self.seconds)

    def take(self, updates: int, clock: Callable[[], float]) -> None:
        """One turn: an update that does not count, then ``updates`` that do."""
        begun = clock()
        self._make(1)
        start = clock()
        turn = Turn(self._make(updates), clock() - start)
        self._finish()
        if not self.ended:
            self.turns.append(turn)
        self.seconds += clock() - begun

    def _make(self, updates: int) -> int:
        """At most so many; how many there were."""
        for made in range(updates):
            loss = None if self.ended else next(self.steps, None)
            if loss is None:
                self.ended = True
                return made
            self.losses.append(loss)
        return updates

    def _finish(self) -> None:
        """Its end, if it has made all: not in a turn of its own."""
        if len(self.losses) == self.updates:
            self._make(1)

    @property
    def counted(self) -> tuple[Turn, ...]:
        """The whole turns; of a run too short for one, all after the warm-up as one; none if there was no more."""
        if self.turns:
            return tuple(self.turns)
        left = Turn(len(self.losses) - self.warmed.updates, self.seconds - self.warmed.seconds)
        return (left,) if left.updates else ()


def take_turns(field: Sequence[Course], meet: Callable[[], None], clock: Callable[[], float],
               show: Callable[[Course], None], updates: int = UPDATES,
               warmed: Callable[[], None] = lambda: None) -> None:
    """Let all contenders warm up, and then take turns until each has ended.

    Args:
        field: the same on every rank, in the same order.
        meet: returns when all ranks have called it.
        clock: seconds.
        show: called after every turn, and after each one's warm-up.
        updates: of a turn that count.
        warmed: called once all have warmed up.
    """
    for course in field:
        meet()
        course.warm(clock)
        show(course)
    warmed()
    while not all(course.ended for course in field):
        for course in field:
            if not course.ended:
                meet()
                course.take(updates, clock)
                show(course)
