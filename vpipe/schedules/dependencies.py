"""Tell for every action of a schedule which other actions it depends on, on its own rank and on others.

:func:`execute` carries out a schedule by these dependencies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vpipe.errors import CheckError
from vpipe.schedules.action import COMPLETES, RECEIVES, RETURNS, SENDS, Action, Op
from vpipe.schedules.error_grid import Spot, rule_error
from vpipe.schedules.schedule import Rounds, Schedule
from vpipe.schedules.size import Placement

OnRank = tuple[Action, int]
"""An action and the rank that executes it."""

_NEIGHBOUR = {Op.SEND_F: (Op.RECV_F, 1), Op.RECV_F: (Op.SEND_F, -1),
              Op.SEND_B: (Op.RECV_B, -1), Op.RECV_B: (Op.SEND_B, 1)}  # the other end, and the offset of its stage
TIED = {Op.SEND_W: Op.RECV_W, Op.RECV_W: Op.SEND_W, Op.SEND_G: Op.RECV_G, Op.RECV_G: Op.SEND_G}


def borrowing_ranks(placement: Placement, owner: int, borrowers: Iterable[int], rank: int) -> list[int]:
    """Return the ranks that get the tied weights of stage ``owner`` from ``rank``, one of its replicas."""
    width = len(placement[owner])
    return [borrower for replica, borrower in
            sorted({replica for stage in borrowers for replica in enumerate(placement[stage])})
            if placement[owner][replica % width] == rank]


@dataclass(frozen=True)
class TransferPeers:
    """Find the other ends of transfers; ``ties`` are the stages that borrow a stage's tied weights, by owning stage."""

    rounds: Rounds
    ties: Mapping[int, Sequence[int]]

    @cached_property
    def borrowing(self) -> Mapping[int, Sequence[int]]:
        """By owning stage, the ranks with a stage that borrows its tied weights."""
        return {owner: sorted({rank for stage in filter(self._exists, borrowers)
                               for rank in self.rounds.placement[stage]}) for owner, borrowers in self.ties.items()}

    @cached_property
    def lending(self) -> Mapping[tuple[int, int], Sequence[int]]:
        """By owning stage and rank, the borrowing ranks that get the weights from that rank."""
        return {(owner, rank): borrowing_ranks(self.rounds.placement, owner, borrowers, rank)
                for owner, borrowers in self.ties.items() if all(map(self._exists, (owner, *borrowers)))
                for rank in self.rounds.placement[owner]}

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that takes a microbatch through a stage; -1 outside the pipeline."""
        return self.rounds.rank_of(stage, microbatch) if self._exists(stage) else -1

    def other_ends(self, transfer: Action, rank: int) -> list[OnRank]:
        """Return the other ends of a send or a receive; none when it leads out of the pipeline.

        Activations and their gradients have no other end on their own rank. Tied weights do: there they change hands.
        """
        op, stage, index = transfer.op, transfer.stage, transfer.microbatch
        if op in _NEIGHBOUR:
            other, offset = _NEIGHBOUR[op]
            peer = self.rank_of(stage + offset, index)
            return [(Action(other, stage + offset, index), peer)] if peer not in (-1, rank) else []
        owners = self.rounds.placement[stage]
        if op is Op.SEND_W:
            peers = self.lending.get((stage, rank), ())
        elif op is Op.RECV_W:
            peers = [owner for owner in owners if rank in self.lending.get((stage, owner), ())]
        else:
            peers = owners if op is Op.SEND_G else self.gradient_senders(stage, index)
        return [(Action(TIED[op], stage, index), peer) for peer in peers]

    def gradient_senders(self, owner: int, update: int) -> list[int]:
        """Return the ranks that send tied gradients of an update to the owner's ranks, in the order of their sends.

        A rank sends behind its last backward of the update, later stages before earlier ones.
        """
        last: dict[int, tuple[int, int]] = {}
        for borrower in filter(self._exists, self.ties.get(owner, ())):
            for rank in self.rounds.placement[borrower]:
                if share := self.rounds.share(owner, update, borrower, rank):
                    last[rank] = max(last.get(rank, (-1, 0)), (share[-1], -borrower))
        return sorted(last, key=lambda rank: (last[rank], rank))

    def _exists(self, stage: int) -> bool:
        return 0 <= stage < len(self.rounds.placement)


@dataclass(frozen=True)
class Dependencies:
    """Hold tables made in one pass over the programs, and answer what the checker's rules ask.

    Attributes:
        where: the spots of every action.
        last: by stage, update and rank, the rank's last action (B or W) that makes weight gradients for it.
        version: the weight version that the forward of (stage, microbatch) uses: that of the last USE before it, else
            the number of steps before it.
        lowered: there are transfers or sums. Without any, actions wait directly for the actions that make their inputs.
        normed: gradient norms are exchanged before the steps.
    """

    schedule: Schedule
    where: Mapping[Action, Sequence[Spot]]
    last: Mapping[tuple[int, int, int], Action]
    version: Mapping[tuple[int, int], int]
    peers: TransferPeers
    lowered: bool
    normed: bool

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> Dependencies:
        where: dict[Action, list[Spot]] = defaultdict(list)
        version: dict[tuple[int, int], int] = {}
        operations: set[Op] = set()
        last: dict[tuple[int, int, int], Action] = {}
        spans = [schedule.rounds.per_update(stage) for stage in range(schedule.stages)]
        for rank, program in enumerate(schedule.programs):
            steps: dict[int, int] = defaultdict(int)
            chosen: dict[int, int] = {}
            for position, action in enumerate(program):
                where[action].append((rank, position))
                operations.add(action.op)
                if action.op is Op.STEP:
                    steps[action.stage] += 1
                elif action.op is Op.USE:
                    chosen[action.stage] = action.microbatch
                elif action.op is Op.FORWARD:
                    version[action.stage, action.microbatch] = chosen.get(action.stage, steps[action.stage])
                elif action.op in COMPLETES and action.stage < len(spans) and spans[action.stage]:
                    last[action.stage, action.microbatch // spans[action.stage], rank] = action
        return cls(schedule, dict(where), last, version, TransferPeers(schedule.rounds, schedule.ties),
                   bool(operations & (SENDS | RECEIVES | {Op.REDUCE})), Op.NORM in operations)

    def error(self, what: str, hint: str, *marks: Spot, cursors: Sequence[int] | None = None) -> CheckError:
        """Return the error of a broken rule; see :func:`~vpipe.schedules.error_grid.rule_error`."""
        return rule_error(self.schedule, what, hint, *marks, cursors=cursors)

    def actions(self) -> Iterator[tuple[Action, Spot]]:
        """Yield every action with its spot, rank after rank."""
        for rank, program in enumerate(self.schedule.programs):
            for position, action in enumerate(program):
                yield action, (rank, position)

    def of_stage(self, stage: int, rank: int) -> Iterator[tuple[Action, Spot]]:
        """Yield the actions of a stage on a rank in order, with their spots."""
        for position, action in enumerate(self.schedule.programs[rank]):
            if action.stage == stage:
                yield action, (rank, position)

    def replicas(self) -> Iterator[tuple[int, int]]:
        """Yield every stage with each of its ranks."""
        for stage, ranks in enumerate(self.schedule.placement):
            for rank in ranks:
                yield stage, rank

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.peers.rank_of(stage, microbatch)

    def end(self, rank: int) -> Spot:
        return rank, len(self.schedule.programs[rank])

    def position(self, action: Action, rank: int) -> int | None:
        """Return the position of ``action`` in the program of ``rank``; None when it is not there."""
        for there, position in self.where.get(action, ()):
            if there == rank:
                return position
        return None

    def input_gradient(self, stage: int, microbatch: int) -> Action:
        """Return the action that makes the input gradients of a microbatch: its I where there is one, else its B."""
        half = Action(Op.INPUT, stage, microbatch)
        return half if half in self.where else Action(Op.BACKWARD, stage, microbatch)

    def weight_gradient(self, stage: int, microbatch: int) -> Action:
        """Return the same for the weight gradients: W or B."""
        half = Action(Op.WEIGHT, stage, microbatch)
        return half if half in self.where else Action(Op.BACKWARD, stage, microbatch)

    def receives(self, action: Action, rank: int) -> Iterator[Action]:
        """Yield the receives that bring the inputs of ``action`` from other stages' ranks."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            if self.rank_of(stage - 1, index) not in (-1, rank):
                yield Action(Op.RECV_F, stage, index)
            for owner, borrowers in self.schedule.ties.items():
                if stage in borrowers and (version := self.version.get((owner, index), 0)) > 0:
                    yield Action(Op.RECV_W, owner, version)
        elif op in RETURNS:
            if self.rank_of(stage + 1, index) not in (-1, rank):
                yield Action(Op.RECV_B, stage, index)
        elif op in (Op.NORM, Op.STEP) and self.peers.borrowing.get(stage):
            yield Action(Op.RECV_G, stage, index)

    def makers(self, action: Action, rank: int) -> Iterator[Action]:
        """Yield the actions of the same rank whose results ``action`` uses, sends or prepares for."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            if self.rank_of(stage - 1, index) == rank:
                yield Action(Op.FORWARD, stage - 1, index)
        elif op in RETURNS:
            yield Action(Op.FORWARD, stage, index)
            if (recompute := Action(Op.RECOMPUTE, stage, index)) in self.where:
                yield recompute
            if self.rank_of(stage + 1, index) == rank:
                yield self.input_gradient(stage + 1, index)
        elif op is Op.WEIGHT:
            yield Action(Op.INPUT, stage, index)
        elif op in (Op.RECOMPUTE, Op.SEND_F, Op.RECV_B):  # the shapes of a gradient are known once its forward has run
            yield Action(Op.FORWARD, stage, index)
        elif op is Op.SEND_B:
            yield self.input_gradient(stage, index)
        elif op is Op.REDUCE:
            yield from self._gradients(stage, index, stage, rank)
        elif op in (Op.NORM, Op.STEP):
            if self.lowered and self.schedule.rounds.width(stage) > 1:
                yield Action(Op.REDUCE, stage, index)
        elif op is Op.SEND_W:
            yield Action(Op.STEP, stage, index - 1)
        elif op is Op.SEND_G:
            for borrower in self.schedule.ties.get(stage, ()):
                if rank in self.schedule.placement[borrower]:
                    yield from self._gradients(stage, index, borrower, rank)

    def _gradients(self, owner: int, update: int, stage: int, rank: int) -> Iterator[Action]:
        for microbatch in self.schedule.rounds.share(owner, update, stage, rank):
            yield self.weight_gradient(stage, microbatch)

    def local_sends(self, action: Action, rank: int) -> Iterator[Action]:
        """Yield the sends of the same rank whose tied weights or gradients ``action`` uses."""
        for receive in self.receives(action, rank):
            if receive.op in (Op.RECV_W, Op.RECV_G):
                yield from (send for send, peer in self.peers.other_ends(receive, rank) if peer == rank)

    def awaited(self, action: Action, rank: int, rendezvous: bool) -> list[OnRank]:
        """Return the actions, besides those before it on its rank, that must be executed before ``action`` can be.

        A receive only posts; the action that uses the tensor waits for the send. A compute-only schedule has no sends:
        there it waits for the action that makes the tensor.
        """
        op, stage, index = action.op, action.stage, action.microbatch
        if op in RECEIVES:
            return []
        if op in SENDS:
            return [other for other in self.peers.other_ends(action, rank) if other[1] != rank] if rendezvous else []
        sends = [send for receive in self.receives(action, rank) for send in self.peers.other_ends(receive, rank)]
        if not self.lowered:
            made = [(maker, peer) for send, peer in sends for maker in self.makers(send, peer)]
            return made + (self._other_replicas(stage, index, rank) if op is Op.STEP else [])
        if op is Op.REDUCE:
            return self._other_replicas(stage, index, rank)
        if op in (Op.NORM, Op.STEP) and self.schedule.rounds.width(stage) > 1:
            sends += [(Action(Op.REDUCE, stage, index), other) for other in self.schedule.placement[stage]
                      if other != rank]
        if op is Op.STEP and self.normed:
            sends += [(Action(Op.NORM, one, index), ranks[0]) for one, ranks in enumerate(self.schedule.placement)
                      if rank not in ranks]
        return sends

    def _other_replicas(self, stage: int, update: int, rank: int) -> list[OnRank]:
        """Return the last action of each other replica that makes its gradients of an update."""
        return [(self.last[stage, update, other], other) for other in self.schedule.placement[stage]
                if other != rank and (stage, update, other) in self.last]


def execute(deps: Dependencies, *, rendezvous: bool) -> tuple[list[int], dict[int, tuple[Action, Action, int]]]:
    """Execute a schedule without time and tensors: every rank goes as far as it can, in whatever order of turns.

    Args:
        rendezvous: a send waits until its receive is posted; otherwise it never waits (buffered).

    Returns:
        How many actions each rank executed, and of the ranks that did not reach their end the action before which they
        stand, the one that they wait for, and its rank.
    """
    programs = deps.schedule.programs
    cursors = [0] * len(programs)
    blocked: dict[int, tuple[Action, Action, int]] = {}
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
                    blocked[rank] = action, awaited, peer
                    if position is not None:
                        sleepers[peer, position].append(rank)
                    break
            if rank in blocked:
                break
            awake += sleepers.pop((rank, cursors[rank]), ())
            cursors[rank] += 1
    return cursors, dict(sorted(blocked.items()))
