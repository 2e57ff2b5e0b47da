"""The turns of a rank that holds two stages in the shape of a V, or several such pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vpipe.schedules.action import Action, Op, step, weight_half
from vpipe.schedules.size import Layout


class Turns:
    """Writes a rank's program as phases of repeated turns.

    A turn is a text such as ``F0 I1 W1``: operations, each with its chunk, 0 on the way down and 1 on the way up. Every
    operation takes the microbatches in order; those from ``microbatches`` on are left out. ``W`` without a chunk is the
    weight half that has waited longest. With several waves, a group of 2p microbatches goes through all of them before
    the next group, and comes back through the last first.
    """

    def __init__(self, rank: int, ranks: int, microbatches: int, waves: int = 1) -> None:
        self._stages = [Layout.ZIGZAG.stage_of(rank, chunk, ranks) for chunk in range(2 * waves)]
        self._microbatches, self._waves, self._group = microbatches, waves, 2 * ranks
        self._taken: Counter[tuple[bool, int]] = Counter()  # passes through a wave, by (forward or not, chunk)
        self._waiting: list[Action] = []

    def of(self, turn: str, times: int) -> Iterator[Action]:
        """The actions of as many such turns."""
        operations = [(Op(word[0]), [int(chunk) for chunk in word[1:]]) for word in turn.split()]
        for _ in range(times):
            for op, chosen in operations:
                yield from self._weight(chosen) if op is Op.WEIGHT else self._next(op, *chosen)

    def rest(self) -> Iterator[Action]:
        """Every weight half that still waits, and the steps."""
        yield from self._waiting
        yield from (step(stage, 0) for stage in self._stages)

    def _weight(self, chosen: list[int]) -> Iterator[Action]:
        stages = [self._stages[chunk] for chunk in chosen] or self._stages
        half = next((half for half in self._waiting if half.stage in stages), None)
        if half is not None:
            self._waiting.remove(half)
            yield half

    def _next(self, op: Op, chunk: int) -> Iterator[Action]:
        goes = op is Op.FORWARD
        groups, within = divmod(self._taken[goes, chunk], self._group * self._waves)
        self._taken[goes, chunk] += 1
        wave, in_group = divmod(within, self._group)
        microbatch = groups * self._group + in_group
        if microbatch < self._microbatches:
            stage = self._stages[2 * (wave if goes else self._waves - 1 - wave) + chunk]
            if op is Op.INPUT:
                self._waiting.append(weight_half(stage, microbatch))
            yield Action(op, stage, microbatch)
