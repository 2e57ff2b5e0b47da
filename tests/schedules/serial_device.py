"""A model of ranks whose device carries out one transfer after the other, in the order in which they were issued.

Also of several lanes, whose layers compute together: rank r of lane l is number l * ranks + r here.
"""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.schedules.action import Action, Op
from vpipe.schedules.graph import Graph
from vpipe.schedules.schedule import Schedule

Transfer = tuple[Action, int, int]
"""The send, the rank that sends, the rank that receives; of a sum over replicas the action, -1 and the lane; of what
lanes compute together in an action that, -2 and its rank in each."""


class SerialDevices:
    """Carry out programs whose transfers block each other: nccl's rules 2 and 3, and the worst case of rule 5.

    Args:
        schedule: lowered; its programs in the order of issue.
        rendezvous: whether a send ends only with its receive; else it is buffered.
        blocking: whether a rank goes on only when what it issued has ended.
        lanes: whose ranks with the same place do something together in all that is no transfer.
    """

    def __init__(self, schedule: Schedule, *, rendezvous: bool, blocking: bool = False, lanes: int = 1) -> None:
        self.schedule, self.rendezvous, self.blocking, self.lanes = schedule, rendezvous, blocking, lanes
        self.deps = Graph.from_schedule(schedule)
        self.programs = list(schedule.programs) * lanes
        ranks = range(len(self.programs))
        self.cursors = [0] * len(ranks)
        self.queues: list[list[Transfer]] = [[] for _ in ranks]
        self.buffered: set[Transfer] = set()
        self.ended: set[tuple[Transfer, int]] = set()  # with the rank on which it has
        self.issued: list[list[Transfer]] = [[] for _ in ranks]
        self.received_tied: dict[tuple[Action, int], int] = {}

    def run(self) -> list[str]:
        """Go as far as all ranks can; what each rank that is not at its end stands before."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.programs)):
                while self._step(rank):
                    moved = True
            moved |= self._transfer()
        return [f"rank {rank} before {self.programs[rank][cursor]}"
                for rank, cursor in enumerate(self.cursors) if cursor < len(self.programs[rank])] + [
                f"rank {rank} has {queue[0][0]} under way" for rank, queue in enumerate(self.queues) if queue]

    def _step(self, rank: int) -> bool:
        program = self.programs[rank]
        if self.cursors[rank] == len(program) or (self.blocking and self.queues[rank]):
            return False
        action = program[self.cursors[rank]]
        if not all(self._is_done(*awaited) for awaited in self._awaited(action, rank)):
            return False
        for transfer in self._transfers(action, rank):
            self.queues[rank].append(transfer)
            self.issued[rank].append(transfer)
        self.cursors[rank] += 1
        return True

    def _transfers(self, action: Action, number: int) -> list[Transfer]:
        lane, rank = divmod(number, self.schedule.ranks)
        first = number - rank
        if action.op.transfer is None:
            together = [(action, -2, rank)] if self.lanes > 1 else []
            return [*together, (action, -1, lane)] if action.op is Op.REDUCE else together
        if action.op.sends:
            return [(action, number, first + peer) for _, peer in self.deps.other_ends(action, rank) if peer != rank]
        sends = self.deps.other_ends(action, rank)
        if action.op is Op.RECV_G:  # once for each of its senders
            place = self.received_tied.setdefault((action, number), 0)
            self.received_tied[action, number] += 1
            sends = sends[place:place + 1]
        return [(send, first + peer, number) for send, peer in sends if peer != rank]

    def _receives(self, action: Action, rank: int) -> list[Action]:
        position = self.deps.position(action, rank)
        return [one for one in self.deps.before(action, (rank, position)) if one.op.receives]

    def _awaited(self, action: Action, number: int) -> list[tuple[Transfer, int]]:
        """What an action waits for: the transfers that bring what it uses."""
        lane, rank = divmod(number, self.schedule.ranks)
        first = number - rank
        found = [((send, first + peer, number), number) for receive in self._receives(action, rank)
                 for send, peer in self.deps.other_ends(receive, rank) if peer != rank]
        if action.op in (Op.NORM, Op.STEP) and self.schedule.assignment.width(action.stage) > 1:
            found.append(((Action(Op.REDUCE, action.stage, action.microbatch), -1, lane), number))
        if action.op is Op.STEP and self.deps.setting.normed:
            found += [((Action(Op.NORM, stage, action.microbatch), -1, -1), first + ranks[0])
                      for stage, ranks in enumerate(self.schedule.placement) if rank not in ranks]
        return found

    def _is_done(self, transfer: Transfer, rank: int) -> bool:
        action = transfer[0]
        if action.op is Op.NORM:  # over the host
            return self.deps.position(action, rank % self.schedule.ranks) < self.cursors[rank]
        return (transfer, rank) in self.ended

    def _transfer(self) -> bool:
        """End what can end at the head of the queues."""
        moved = False
        for rank, queue in enumerate(self.queues):
            if not queue:
                continue
            transfer = queue[0]
            action, source, target = transfer
            if source == -2:
                ranks: Sequence[int] = range(target, len(self.programs), self.schedule.ranks)
            elif source == -1:
                ranks = [target * self.schedule.ranks + each for each in self.schedule.placement[action.stage]]
            elif self.rendezvous:
                ranks = (source, target)
            elif rank == source:
                self.buffered.add(transfer)
                ranks = (source,)
            elif transfer in self.buffered:
                ranks = (target,)
            else:
                continue
            if all(self.queues[other] and self.queues[other][0] == transfer for other in ranks):
                for other in ranks:
                    self.queues[other].pop(0)
                    self.ended.add((transfer, other))
                moved = True
        return moved
