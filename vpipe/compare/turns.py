"""Turns: several pipelines live in the same processes and train one after the other, a few updates at a time.

So whatever else the machine does falls on all of them alike. A pipeline without a flush stays full from turn to turn;
the first update of a turn, which finds the caches full of the others' data, does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vpipe.compare.outcome import Turn

UPDATES = 4
"""Of a turn that count."""


@dataclass
class Course:
    """What a contender has done so far.

    Attributes:
        name: whose.
        steps: yields the loss of one update after the other, until it has made all.
        updates: how many these will be; None when nobody knows.
        losses: of its updates.
        turns: in order.
        seconds: in all its turns.
        ended: whether it has made all of its updates.
    """

    name: str
    steps: Iterator[float]
    updates: int | None = None
    losses: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    ended: bool = False

    def take(self, updates: int, clock: Callable[[], float]) -> None:
        """One turn: an update that does not count, then ``updates`` that do."""
        begun = clock()
        if self._step():
            start, made = clock(), 0
            while made < updates and self._step():
                made += 1
            if made:
                self.turns.append(Turn(made, clock() - start))
            if len(self.losses) == self.updates:
                self._step()  # to its end, not in a turn of its own
        self.seconds += clock() - begun

    def _step(self) -> bool:
        loss = next(self.steps, None)
        if loss is None:
            self.ended = True
            return False
        self.losses.append(loss)
        return True


    @property
    def counted(self) -> tuple[Turn, ...]:
        """Without the first turn, which warms up, and the last, in which a pipeline runs empty; a run that was too
        short for that counts as one turn.
        """
        return tuple(self.turns[1:-1]) or (Turn(len(self.losses), self.seconds),)


def take_turns(field: Sequence[Course], meet: Callable[[], None], clock: Callable[[], float],
               show: Callable[[Course], None], updates: int = UPDATES) -> None:
    """Let all contenders take turns until each has ended.

    Args:
        field: the same on every rank, in the same order.
        meet: returns when all ranks have called it.
        clock: seconds.
        show: called after every turn.
        updates: of a turn that count.
    """
    while not all(course.ended for course in field):
        for course in field:
            if not course.ended:
                meet()
                course.take(updates, clock)
                show(course)
