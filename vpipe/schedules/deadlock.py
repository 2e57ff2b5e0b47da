"""Detect deadlocks: execute a schedule without time and tensors, and see whether every rank reaches its end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from vpipe.schedules.action import Action
from vpipe.schedules.dependencies import Dependencies
from vpipe.schedules.error_grid import Spot, rule_error
from vpipe.schedules.transfer_order import in_one_order


@dataclass(frozen=True)
class BlockedRank:
    """A rank that cannot go on: it stands before ``action`` and waits for ``awaited`` of rank ``peer``."""

    rank: int
    action: Action
    awaited: Action
    peer: int

    def __str__(self) -> str:
        return f"rank {self.rank} stands before {self.action} and waits for {self.awaited} of rank {self.peer}"


def execute(deps: Dependencies, *, rendezvous: bool) -> tuple[list[int], list[BlockedRank]]:
    """Let every rank go as far as it can; the order in which ranks take turns makes no difference.

    Args:
        rendezvous: a send waits until its receive is posted; otherwise it never waits (buffered).

    Returns:
        How many actions each rank executed, and the ranks that did not reach their end.
    """
    programs = deps.schedule.programs
    cursors = [0] * len(programs)
    blocked: dict[int, BlockedRank] = {}
    sleepers: dict[Spot, list[int]] = defaultdict(list)  # ranks to wake when a spot has been executed
    awake = list(range(len(programs)))
    while awake:
        rank = awake.pop()
        blocked.pop(rank, None)
        while cursors[rank] < len(programs[rank]):
            action = programs[rank][cursors[rank]]
            for awaited, peer in deps.awaited(action, rank, rendezvous):
                position = deps.position(awaited, peer)
                if position is None or position >= cursors[peer]:
                    blocked[rank] = BlockedRank(rank, action, awaited, peer)
                    if position is not None:
                        sleepers[peer, position].append(rank)
                    break
            if rank in blocked:
                break
            awake += sleepers.pop((rank, cursors[rank]), ())
            cursors[rank] += 1
    return cursors, [blocked[rank] for rank in sorted(blocked)]


def no_deadlock_buffered(deps: Dependencies) -> None:
    """Check that every rank reaches its end when sends never wait."""
    _reaches_end(deps, rendezvous=False)


def no_deadlock_rendezvous(deps: Dependencies) -> None:
    """Check that every rank reaches its end when a send waits until its receive is posted."""
    _reaches_end(deps, rendezvous=True)


def no_deadlock_in_one_order(deps: Dependencies) -> None:
    """Check that every rank reaches its end when it does one transfer at a time, in an order that all ranks keep to.

    nccl asks for that: see :class:`vpipe.schedules.transfer_order.TransferOrder`.
    """
    if not deps.lowered:
        return
    _, stuck = in_one_order(deps)
    if stuck:
        waiting = "; ".join(f"rank {rank} stands before {action}" for rank, action in stuck.items())
        cursors = [deps.position(stuck[rank], rank) or 0 if rank in stuck else len(program)
                   for rank, program in enumerate(deps.schedule.programs)]
        raise rule_error(deps.schedule, f"deadlock when a rank carries out one transfer at a time (nccl): {waiting}",
                         "let the replicas of a stage come to their sums in one order, and the ranks that borrow a "
                         "weight to their gradients in the order of the microbatches",
                         *((rank, cursors[rank]) for rank in stuck), cursors=cursors)


def _reaches_end(deps: Dependencies, rendezvous: bool) -> None:
    cursors, blocked = execute(deps, rendezvous=rendezvous)
    if blocked:
        kind = "wait for their receive (rendezvous)" if rendezvous else "never wait (buffered)"
        raise rule_error(deps.schedule, f"deadlock when sends {kind}: {'; '.join(map(str, blocked))}",
                         "move the awaited actions forward in their programs, or the waiting ones back",
                         *((one.rank, cursors[one.rank]) for one in blocked), cursors=cursors)
