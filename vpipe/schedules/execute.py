"""Executing a schedule without time and tensors, to see whether every rank reaches its end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from vpipe.schedules.action import Action
from vpipe.schedules.grid import Spot
from vpipe.schedules.reading import Reading


@dataclass(frozen=True)
class Stuck:
    """A rank that cannot go on: it stands before ``action`` and waits for ``awaited`` of rank ``peer``."""

    rank: int
    action: Action
    awaited: Action
    peer: int

    def __str__(self) -> str:
        return f"rank {self.rank} stands before {self.action} and waits for {self.awaited} of rank {self.peer}"


def execute(reading: Reading, *, rendezvous: bool) -> tuple[list[int], list[Stuck]]:
    """Every rank goes as far as it can; the order in which ranks take turns makes no difference.

    Args:
        reading: the schedule.
        rendezvous: a send waits until its receive is posted; otherwise it never waits (buffered).

    Returns:
        How many actions each rank executed, and the ranks that did not reach their end.
    """
    programs = reading.schedule.programs
    cursors = [0] * len(programs)
    stuck: dict[int, Stuck] = {}
    sleepers: dict[Spot, list[int]] = defaultdict(list)  # ranks to wake when a spot has been executed
    awake = list(range(len(programs)))
    while awake:
        rank = awake.pop()
        stuck.pop(rank, None)
        while cursors[rank] < len(programs[rank]):
            action = programs[rank][cursors[rank]]
            for awaited, peer in reading.waits(action, rank, rendezvous):
                position = reading.position(awaited, peer)
                if position is None or position >= cursors[peer]:
                    stuck[rank] = Stuck(rank, action, awaited, peer)
                    if position is not None:
                        sleepers[peer, position].append(rank)
                    break
            if rank in stuck:
                break
            awake += sleepers.pop((rank, cursors[rank]), ())
            cursors[rank] += 1
    return cursors, [stuck[rank] for rank in sorted(stuck)]
