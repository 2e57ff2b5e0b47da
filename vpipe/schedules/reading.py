"""A schedule as the checker reads it: where every action stands, and what it means for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vpipe.schedules.action import COMPLETES, RECEIVES, RETURNS, SENDS, Action, Op
from vpipe.schedules.grid import Spot
from vpipe.schedules.order import Schedule
from vpipe.schedules.partners import OnRank, Partners


@dataclass(frozen=True)
class Reading:
    """Tables made in one pass over the programs, and the questions that several rules ask.

    Attributes:
        schedule: what was read.
        where: the spots of every action.
        last: by stage, update and rank, the rank's last action (B or W) that makes weight gradients for it.
        version: the weight version that the forward of (stage, microbatch) uses: what the last USE before it says,
            else the number of steps before it.
        partners: finds the other ends of transfers.
        lowered: whether there are transfers or sums; without any the actions wait for each other directly.
        normed: whether gradient norms are exchanged before the steps.
    """

    schedule: Schedule
    where: Mapping[Action, Sequence[Spot]]
    last: Mapping[tuple[int, int, int], Action]
    version: Mapping[tuple[int, int], int]
    partners: Partners
    lowered: bool
    normed: bool

    @classmethod
    def of(cls, schedule: Schedule) -> Reading:
        where: dict[Action, list[Spot]] = defaultdict(list)
        version: dict[tuple[int, int], int] = {}
        operations: set[Op] = set()
        last: dict[tuple[int, int, int], Action] = {}
        spans = [schedule.rounds.span(stage) for stage in range(schedule.stages)]
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
        return cls(schedule, dict(where), last, version, Partners(schedule.rounds, schedule.ties),
                   bool(operations & (SENDS | RECEIVES | {Op.REDUCE})), Op.NORM in operations)

    def actions(self) -> Iterator[tuple[Action, Spot]]:
        """Every action with its spot, rank after rank."""
        for rank, program in enumerate(self.schedule.programs):
            for position, action in enumerate(program):
                yield action, (rank, position)

    def of_stage(self, stage: int, rank: int) -> Iterator[tuple[Action, Spot]]:
        """The actions of a stage on a rank in order, with their spots."""
        for position, action in enumerate(self.schedule.programs[rank]):
            if action.stage == stage:
                yield action, (rank, position)

    def replicas(self) -> Iterator[tuple[int, int]]:
        """Every stage with every rank that it lives on."""
        for stage, ranks in enumerate(self.schedule.placement):
            for rank in ranks:
                yield stage, rank

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that takes a microbatch through a stage; -1 outside the pipeline."""
        return self.partners.rank_of(stage, microbatch)

    def end(self, rank: int) -> Spot:
        return rank, len(self.schedule.programs[rank])

    def position(self, action: Action, rank: int) -> int | None:
        """Where ``action`` stands in the program of ``rank``; None when it does not."""
        for there, position in self.where.get(action, ()):
            if there == rank:
                return position
        return None

    def returning(self, stage: int, microbatch: int) -> Action:
        """What makes the input gradients of a microbatch: its input half where there is one, else its backward."""
        half = Action(Op.INPUT, stage, microbatch)
        return half if half in self.where else Action(Op.BACKWARD, stage, microbatch)

    def completing(self, stage: int, microbatch: int) -> Action:
        """What makes the weight gradients of a microbatch: its weight half where there is one, else its backward."""
        half = Action(Op.WEIGHT, stage, microbatch)
        return half if half in self.where else Action(Op.BACKWARD, stage, microbatch)

    def receives(self, action: Action, rank: int) -> Iterator[Action]:
        """The receives that bring what ``action`` uses from other stages' ranks."""
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
        elif op in (Op.NORM, Op.STEP) and self.partners.borrowing.get(stage):
            yield Action(Op.RECV_G, stage, index)

    def makers(self, action: Action, rank: int) -> Iterator[Action]:
        """The actions of the same rank whose results ``action`` uses, sends or gets ready for."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            if self.rank_of(stage - 1, index) == rank:
                yield Action(Op.FORWARD, stage - 1, index)
        elif op in RETURNS:
            yield Action(Op.FORWARD, stage, index)
            if (recompute := Action(Op.RECOMPUTE, stage, index)) in self.where:
                yield recompute
            if self.rank_of(stage + 1, index) == rank:
                yield self.returning(stage + 1, index)
        elif op is Op.WEIGHT:
            yield Action(Op.INPUT, stage, index)
        elif op in (Op.RECOMPUTE, Op.SEND_F, Op.RECV_B):  # the shapes of a gradient are known once its forward has run
            yield Action(Op.FORWARD, stage, index)
        elif op is Op.SEND_B:
            yield self.returning(stage, index)
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
        """What makes a rank's gradients, at ``stage``, of an update of ``owner``."""
        for microbatch in self.schedule.rounds.share(owner, update, stage, rank):
            yield self.completing(stage, microbatch)

    def handed_over(self, action: Action, rank: int) -> Iterator[Action]:
        """The sends of the same rank whose tied weights or gradients ``action`` uses."""
        for receive in self.receives(action, rank):
            if receive.op in (Op.RECV_W, Op.RECV_G):
                yield from (send for send, peer in self.partners.of(receive, rank) if peer == rank)

    def waits(self, action: Action, rank: int, rendezvous: bool) -> list[OnRank]:
        """The actions that must have been executed before ``action`` can be, besides those before it on its rank.

        A receive only posts; what uses the tensor waits for the send. A compute-only schedule has no
        sends: there it waits for what makes the tensor.
        """
        op, stage, index = action.op, action.stage, action.microbatch
        if op in RECEIVES:
            return []
        if op in SENDS:
            return [other for other in self.partners.of(action, rank) if other[1] != rank] if rendezvous else []
        sends = [send for receive in self.receives(action, rank) for send in self.partners.of(receive, rank)]
        if not self.lowered:
            made = [(maker, peer) for send, peer in sends for maker in self.makers(send, peer)]
            return made + (self._others(stage, index, rank) if op is Op.STEP else [])
        if op is Op.REDUCE:
            return self._others(stage, index, rank)
        if op in (Op.NORM, Op.STEP) and self.schedule.rounds.width(stage) > 1:
            sends += [(Action(Op.REDUCE, stage, index), other) for other in self.schedule.placement[stage]
                      if other != rank]
        if op is Op.STEP and self.normed:
            sends += [(Action(Op.NORM, one, index), ranks[0]) for one, ranks in enumerate(self.schedule.placement)
                      if rank not in ranks]
        return sends

    def _others(self, stage: int, update: int, rank: int) -> list[OnRank]:
        """The last of what makes the other replicas' gradients of an update."""
        return [(self.last[stage, update, other], other) for other in self.schedule.placement[stage]
                if other != rank and (stage, update, other) in self.last]
