"""A schedule as the checker reads it: where every action stands, and what it means for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vpipe.schedules.action import RECEIVES, SENDS, Action, Op
from vpipe.schedules.grid import Spot
from vpipe.schedules.order import Schedule

OnRank = tuple[Action, int]
"""An action and the rank that executes it."""


@dataclass(frozen=True)
class Reading:
    """Tables made in one pass over the programs, and the questions that several rules ask.

    Attributes:
        schedule: what was read.
        where: the spots of every action.
        version: the weight version (steps before it) that the forward of (stage, microbatch) uses.
        lowered: whether there are transfers; without any the actions wait for each other directly.
        normed: whether gradient norms are exchanged before the steps.
    """

    schedule: Schedule
    where: Mapping[Action, Sequence[Spot]]
    version: Mapping[tuple[int, int], int]
    lowered: bool
    normed: bool

    @classmethod
    def of(cls, schedule: Schedule) -> Reading:
        where: dict[Action, list[Spot]] = defaultdict(list)
        version: dict[tuple[int, int], int] = {}
        operations: set[Op] = set()
        for rank, program in enumerate(schedule.programs):
            steps: dict[int, int] = defaultdict(int)
            for position, action in enumerate(program):
                where[action].append((rank, position))
                operations.add(action.op)
                if action.op is Op.STEP:
                    steps[action.stage] += 1
                elif action.op is Op.FORWARD:
                    version[action.stage, action.microbatch] = steps[action.stage]
        return cls(schedule, dict(where), version, bool(operations & (SENDS | RECEIVES)), Op.NORM in operations)

    @property
    def updates(self) -> int:
        return self.schedule.microbatches // self.schedule.update_every

    def actions(self) -> Iterator[tuple[Action, Spot]]:
        """Every action with its spot, rank after rank."""
        for rank, program in enumerate(self.schedule.programs):
            for position, action in enumerate(program):
                yield action, (rank, position)

    def of_stage(self, stage: int) -> Iterator[tuple[Action, Spot]]:
        """The actions of a stage (on its rank) in order, with their spots."""
        rank = self.rank_of(stage)
        for position, action in enumerate(self.schedule.programs[rank]):
            if action.stage == stage:
                yield action, (rank, position)

    def rank_of(self, stage: int) -> int:
        return self.schedule.placement[stage][0]

    def end(self, rank: int) -> Spot:
        return rank, len(self.schedule.programs[rank])

    def position(self, action: Action, rank: int) -> int | None:
        """Where ``action`` stands in the program of ``rank``; None when it does not."""
        for there, position in self.where.get(action, ()):
            if there == rank:
                return position
        return None

    def borrowers(self, owner: int) -> Sequence[int]:
        """The ranks that borrow the tied weights of stage ``owner``."""
        return self.schedule.ties.get(owner, ())

    def receives(self, action: Action, rank: int) -> Iterator[Action]:
        """The receives that bring what ``action`` uses from other ranks."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            if stage > 0 and self.rank_of(stage - 1) != rank:
                yield Action(Op.RECV_F, stage, index)
            for owner, borrowers in self.schedule.ties.items():
                if rank in borrowers and (version := self.version[owner, index]) > 0:
                    yield Action(Op.RECV_W, owner, version)
        elif op is Op.BACKWARD:
            if stage + 1 < self.schedule.stages and self.rank_of(stage + 1) != rank:
                yield Action(Op.RECV_B, stage, index)
        elif op in (Op.NORM, Op.STEP) and self.borrowers(stage):
            yield Action(Op.RECV_G, stage, index)

    def makers(self, action: Action, rank: int) -> Iterator[Action]:
        """The actions of the same rank whose results ``action`` uses or sends."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD and stage > 0 and self.rank_of(stage - 1) == rank:
            yield Action(Op.FORWARD, stage - 1, index)
        elif op is Op.BACKWARD:
            yield Action(Op.FORWARD, stage, index)
            if stage + 1 < self.schedule.stages and self.rank_of(stage + 1) == rank:
                yield Action(Op.BACKWARD, stage + 1, index)
        elif op is Op.SEND_F:
            yield Action(Op.FORWARD, stage, index)
        elif op is Op.SEND_B:
            yield Action(Op.BACKWARD, stage, index)
        elif op is Op.SEND_W:
            yield Action(Op.STEP, stage, index - 1)
        elif op is Op.SEND_G:
            every = self.schedule.update_every
            for borrower in range(self.schedule.stages):
                if self.rank_of(borrower) == rank:
                    for microbatch in range(index * every, (index + 1) * every):
                        yield Action(Op.BACKWARD, borrower, microbatch)

    def partners(self, transfer: Action, rank: int) -> list[OnRank]:
        """The other ends of a send or a receive; none when it leads out of the pipeline or to its own rank."""
        op, stage, index = transfer.op, transfer.stage, transfer.microbatch
        if op in _NEIGHBOUR:
            other, offset = _NEIGHBOUR[op]
            peer = stage + offset
            inside = 0 <= peer < self.schedule.stages and self.rank_of(peer) != rank
            return [(Action(other, peer, index), self.rank_of(peer))] if inside else []
        other, lends = _TIED[op]
        peers = self.borrowers(stage) if lends else [self.rank_of(stage)]
        return [(Action(other, stage, index), peer) for peer in peers]

    def waits(self, action: Action, rank: int, rendezvous: bool) -> list[OnRank]:
        """The actions that must have been executed before ``action`` can be, besides those before it on its rank.

        A receive only posts; what uses the tensor waits for the send. A compute-only schedule has no
        sends: there it waits for what makes the tensor.
        """
        if action.op in RECEIVES:
            return []
        if action.op in SENDS:
            return self.partners(action, rank) if rendezvous else []
        sends = [send for receive in self.receives(action, rank) for send in self.partners(receive, rank)]
        if not self.lowered:
            return [(maker, peer) for send, peer in sends for maker in self.makers(send, peer)]
        if action.op is Op.STEP and self.normed:
            sends += [(Action(Op.NORM, stage, action.microbatch), self.rank_of(stage))
                      for stage in range(self.schedule.stages)]
        return sends


_NEIGHBOUR = {Op.SEND_F: (Op.RECV_F, 1), Op.RECV_F: (Op.SEND_F, -1),
              Op.SEND_B: (Op.RECV_B, -1), Op.RECV_B: (Op.SEND_B, 1)}  # the other end, and its stage seen from here
_TIED = {Op.SEND_W: (Op.RECV_W, True), Op.RECV_W: (Op.SEND_W, False),
         Op.SEND_G: (Op.RECV_G, False), Op.RECV_G: (Op.SEND_G, True)}  # the other end, and whether the owner is here
