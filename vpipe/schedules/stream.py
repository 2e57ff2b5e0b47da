"""Follow a stream while it runs: the order of its actions, and the weight versions that its microbatches use.

Nobody knows how long a stream is. What stands here reads no further in its programs than necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

from vpipe.schedules.assignment import Assignment, stages_of_rank
from vpipe.schedules.graph import OnRank
from vpipe.schedules.kinds import Action
from vpipe.schedules.lowering import Standing
from vpipe.schedules.schedule import versions_used

_REMEMBERED = 4096
"""Microbatches whose versions are remembered: far more than are ever in flight."""


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


_MOST_STEPS = 256
"""Steps after the warm-up by which the order of a stream repeats; else all ranks are followed all along."""


class StreamOrder:
    """Order a stream, for transports or in turns, without following all ranks through the whole stream.

    After the warm-up the programs repeat. Once every rank stands where it stood some steps before, and goes on as soon
    as then, the order repeats, too. So the programs of all ranks are carried out for the beginning of an endless
    stream, once. The end of a stream is that of a shorter one, from which repetitions are left out.

    Args:
        order_of: returns the order of a stream with an assignment, and what returns how ranks stand in it.
        assignment: of the stream; which microbatches exist does not matter.
        rank: a rank in that order.
        settled: microbatches after which no rank is in its warm-up, nor in that of its versions.
    """

    def __init__(self, order_of: Callable[[Assignment], tuple[Iterator[OnRank], Callable[[], Standing]]],
                 assignment: Assignment, rank: int, settled: int) -> None:
        self._order_of, self._assignment = order_of, assignment
        # With the last microbatch that was asked for since the action before, and as how many an index of it counts.
        self._beginning: list[tuple[Action, int, int, int]] = []
        self._first = self._period = 0  # the position from which it repeats, and after how many microbatches
        asked = latest = -1

        def exists(microbatch: int) -> bool:
            nonlocal asked
            asked = max(asked, microbatch)
            return True

        actions, standing = order_of(replace(assignment, has_microbatch=exists))
        met: dict[Hashable, tuple[int, int]] = {}
        stage = stages_of_rank(assignment.placement, rank)[0]
        for action, at in actions:
            self._beginning.append((action, at, asked, _microbatches(action, assignment)))
            latest, asked = max(latest, asked), -1
            done = (action.index + 1) * assignment.per_update(stage)
            if action.op.makes_version and at == rank and done >= settled and not done % assignment.per_step:
                stands = latest - done, *((head and head._replace(index=head.index * _microbatches(head, assignment)
                                                                 - done), more) for head, more in standing())
                if stands in met:
                    self._first, before = met[stands]
                    self._period = done - before
                if stands in met or len(met) == _MOST_STEPS:
                    return
                met[stands] = len(self._beginning), done

    def program(self, has_microbatch: Callable[[int], bool]) -> Iterator[OnRank]:
        """Yield lazily the actions in a stream with these microbatches."""
        position = shift = passed = 0
        while self._period:
            (op, stage, index), rank, asked, counts = self._beginning[position]
            if asked >= 0 and not has_microbatch(asked + shift):
                break
            yield Action(op, stage, index + shift // counts), rank
            position += 1
            if position == len(self._beginning):
                position, shift = self._first, shift + self._period
        actions, _ = self._order_of(replace(  # that of a pause may have been there before
            self._assignment, has_microbatch=lambda n: passed < position or has_microbatch(n + shift)))
        for action, rank in actions:
            passed += 1
            if passed > position:
                yield action._replace(index=action.index + shift // _microbatches(action, self._assignment)), rank


def _microbatches(action: Action, assignment: Assignment) -> int:
    """Return how many microbatches the index of an action counts as."""
    return 1 if action.op.per_microbatch else assignment.per_update(action.stage)
