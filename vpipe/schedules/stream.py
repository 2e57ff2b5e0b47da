"""Follow a stream while it runs: the order of its transfers, and the weight versions that its microbatches use.

Nobody knows how long a stream is. What stands here reads no further in its programs than necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from vpipe.errors import UserError
from vpipe.schedules.assignment import Assignment, stages_of_rank
from vpipe.schedules.kinds import Action
from vpipe.schedules.lowering import TransferOrder, microbatches_per_index
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
    """Put the transfers of a stream into one order on a rank, without following all ranks through the whole stream.

    After the warm-up the programs repeat. Once every rank stands where it stood some steps before, and goes on as soon
    as then, the common order repeats, too. So the programs of all ranks are carried out for the beginning of an endless
    stream, once. The end of a stream is that of a shorter one, from which repetitions are left out.

    Args:
        order_of: returns the common order of a stream with an assignment, for this rank.
        assignment: of the stream; which microbatches exist does not matter.
        settled: microbatches after which no rank is in its warm-up.
    """

    def __init__(self, order_of: Callable[[Assignment], TransferOrder], assignment: Assignment, rank: int,
                 settled: int) -> None:
        self._order_of, self._assignment, self._rank = order_of, assignment, rank
        self._beginning: list[tuple[Action, int]] = []  # with the last microbatch that was asked for until then
        self._first = self._period = 0  # the position from which it repeats, and after how many microbatches
        asked = 0

        def exists(microbatch: int) -> bool:
            nonlocal asked
            asked = max(asked, microbatch)
            return True

        order, met = order_of(replace(assignment, has_microbatch=exists)), dict[Hashable, tuple[int, int]]()
        stage = stages_of_rank(assignment.placement, rank)[0]
        for action in order.program(rank):
            self._beginning.append((action, asked))
            done = (action.index + 1) * assignment.per_update(stage)
            if action.op.makes_version and action.stage == stage and done >= settled and not done % assignment.per_step:
                standing = asked - done, order.standing(done)
                if standing in met:
                    self._first, before = met[standing]
                    self._period = done - before
                if standing in met or len(met) == _MOST_STEPS:
                    return
                met[standing] = len(self._beginning), done

    def program(self, has_microbatch: Callable[[int], bool], own: Iterator[Action]) -> Iterator[Action]:
        """Yield lazily the actions of the rank in a stream with these microbatches.

        Args:
            own: its actions without the common order.

        Raises:
            UserError: they do not repeat, though its beginning did.
        """
        position = shift = 0
        without_receives = (action for action in own if not action.op.receives)
        while self._period and has_microbatch(self._beginning[position][1] + shift):
            action = self._shifted(self._beginning[position][0], shift)
            if not action.op.receives and (found := next(without_receives, None)) != action:
                raise UserError(f"rank {self._rank} comes to {found} where {action} is due, as {self._period} "
                                "microbatches before", hint="let the schedule's generator repeat the order of its "
                                f"actions after every {self._assignment.per_step} microbatches")
            yield action
            position += 1
            if position == len(self._beginning):
                position, shift = self._first, shift + self._period
        order = self._order_of(replace(self._assignment, has_microbatch=lambda number: has_microbatch(number + shift)))
        for action in islice(order.program(self._rank), position, None):
            yield self._shifted(action, shift)

    def _shifted(self, action: Action, microbatches: int) -> Action:
        return action._replace(index=action.index + microbatches // microbatches_per_index(action, self._assignment))
