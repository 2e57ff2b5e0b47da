"""Put the transfers of all ranks into one order, which nccl needs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from vpipe.schedules.action import RECEIVES, RETURNS, SENDS, Action, Op
from vpipe.schedules.dependencies import Dependencies, TransferPeers
from vpipe.schedules.replication import Rounds
from vpipe.schedules.schedule import Schedule

_TICKS = {Op.FORWARD: 1, Op.RECOMPUTE: 1, Op.INPUT: 1, Op.WEIGHT: 1, Op.BACKWARD: 2}
"""Virtual time of actions; others take none."""

VersionOf = Callable[[int, int, int], int]
"""(rank, owning stage, microbatch) -> version of the tied weights that the rank's forward uses."""


class TransferOrder:
    """Put the transfers of all ranks into one order, and place the receives accordingly.

    nccl matches sends and receives by their order alone, carries out the operations of a communicator one after the
    other, and does not promise that operations of several communicators on one device run at the same time. A receive
    that is posted early then holds up every later operation of its rank, and two ranks that wait for each other's sends
    deadlock.

    So all ranks keep to one sequence of transfers. The programs of all ranks are carried out in virtual time, without
    tensors. When a rank comes to a send, the receive is placed in its receiver's program, at the action that the
    receiver has come to. So the transfers of every rank are a part of one sequence. The first transfer of the sequence
    that is not done can always go on, because both its ranks have done everything before it. That holds for any number
    of communicators, for buffered sends and for sends that wait for their receives.

    The sum over the replicas of a stage counts as one transfer in which all of them take part.

    Args:
        rounds: assigns microbatches to replicas and updates.
        ties: stages that borrow a stage's tied weights, by owning stage.
        programs: of every rank, lowered; their own receives are left out.
        version_of: returns the version of borrowed weights.
        normed: steps wait for the gradient norms of all stages.
        ranks: whose actions are wanted; those of the others are made and forgotten.
    """

    def __init__(self, rounds: Rounds, ties: Mapping[int, Sequence[int]], programs: Sequence[Iterator[Action]],
                 version_of: VersionOf, *, normed: bool, ranks: Collection[int]) -> None:
        self._rounds, self._peers = rounds, TransferPeers(rounds, ties)
        self._version_of, self._normed = version_of, normed
        self._programs = [(action for action in program if action.op not in RECEIVES) for program in programs]
        self._owners = {borrower: [owner for owner in ties if borrower in ties[owner]]
                        for borrowers in ties.values() for borrower in borrowers}
        self._placed: dict[int, deque[Action]] = {rank: deque() for rank in ranks}
        self._next: list[Action | None] = [next(program, None) for program in self._programs]
        self._awake = [(0, rank) for rank, action in enumerate(self._next) if action is not None]
        heapify(self._awake)
        self._now = 0
        self._asleep: set[int] = set()
        self._arrived: set[tuple[Action, int]] = set()  # receives of activations and gradients, until they are used
        self._versions: Counter[tuple[int, int]] = Counter()  # newest version of tied weights, by rank and owner
        self._tied: Counter[tuple[int, int]] = Counter()  # ranks that sent tied gradients, by owner and update
        self._got_tied: Counter[tuple[Action, int]] = Counter()  # the same, seen from a rank of the owner
        self._arrived_at: dict[Action, set[int]] = defaultdict(set)  # ranks that have come to a sum over replicas
        self._norms: set[tuple[int, int, int]] = set()  # stage, update, rank

    def program(self, rank: int) -> Iterator[Action]:
        """Yield lazily the actions of a rank, with its receives in the common order."""
        placed = self._placed[rank]
        while True:
            while placed:
                yield placed.popleft()
            if not self._awake:
                return
            self._go_on()

    @property
    def stuck(self) -> Mapping[int, Action]:
        """The ranks that can never go on, with the actions before which they stand; read it at the end."""
        return {rank: action for rank in sorted(self._asleep) if (action := self._next[rank]) is not None}

    def _go_on(self) -> None:
        """Carry out one action, of the rank whose clock is behind those of the others."""
        self._now, rank = heappop(self._awake)
        action = self._next[rank]
        assert action is not None, "a rank at the end of its program is not awake"
        if action.op is Op.REDUCE:
            self._sum(action, rank)
        elif self._can_go_on(action, rank):
            self._place(action, rank)
            self._send(action, rank)
            self._pass(action, rank)
        else:
            self._asleep.add(rank)

    def _pass(self, action: Action, rank: int) -> None:
        """Let a rank come to the action behind this one."""
        self._next[rank] = next(self._programs[rank], None)
        if self._next[rank] is not None:
            heappush(self._awake, (self._now + _TICKS.get(action.op, 0), rank))

    def _sum(self, action: Action, rank: int) -> None:
        """Carry out a sum over replicas, as one transfer, when all of them have come to it."""
        ranks, come = self._rounds.placement[action.stage], self._arrived_at[action]
        come.add(rank)
        self._asleep.add(rank)
        if len(come) < len(ranks):
            return
        del self._arrived_at[action]
        self._awake = [entry for entry in self._awake if entry[1] not in ranks]  # who was woken meanwhile
        heapify(self._awake)
        for replica in ranks:
            self._asleep.discard(replica)
            self._place(action, replica)
            self._pass(action, replica)

    def _send(self, action: Action, rank: int) -> None:
        """Deliver to the other ranks what an action sends."""
        stage, index = action.stage, action.microbatch
        if action.op in SENDS:
            for receive, peer in self._peers.other_ends(action, rank):
                self._place(receive, peer)
                self._deliver(receive, peer)
            if action.op is Op.SEND_G:
                senders = self._peers.gradient_senders(stage, index)
                self._tied[stage, index] += 1
                if self._tied[stage, index] == len(senders):
                    del self._tied[stage, index]
                else:
                    self._wake(senders[self._tied[stage, index]])
        elif action.op is Op.FORWARD:
            self._arrived.discard((Action(Op.RECV_F, stage, index), rank))
        elif action.op in RETURNS:
            self._arrived.discard((Action(Op.RECV_B, stage, index), rank))
        elif action.op is Op.NORM:
            self._norms.add((stage, index, rank))
            for sleeper in sorted(self._asleep):
                self._wake(sleeper)

    def _place(self, action: Action, rank: int) -> None:
        if rank in self._placed:
            self._placed[rank].append(action)

    def _deliver(self, receive: Action, rank: int) -> None:
        if receive.op is Op.RECV_W:
            self._versions[rank, receive.stage] = receive.microbatch
        elif receive.op is Op.RECV_G:
            self._got_tied[receive, rank] += 1
        else:
            self._arrived.add((receive, rank))
        self._wake(rank)

    def _wake(self, rank: int) -> None:
        if rank in self._asleep:
            self._asleep.remove(rank)
            heappush(self._awake, (self._now, rank))

    def _can_go_on(self, action: Action, rank: int) -> bool:
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            return (self._has(Action(Op.RECV_F, stage, index), stage - 1, rank)
                    and all(self._versions[rank, owner] >= self._version_of(rank, owner, index)
                            for owner in self._owners.get(stage, ())))
        if op in RETURNS:
            return self._has(Action(Op.RECV_B, stage, index), stage + 1, rank)
        if op is Op.SEND_G:
            # All ranks of the owner take the gradients in one order.
            return self._peers.gradient_senders(stage, index)[self._tied[stage, index]] == rank
        if op is Op.NORM or op is Op.STEP:
            if op is (Op.NORM if self._normed else Op.STEP) and stage in self._peers.ties:
                got = Action(Op.RECV_G, stage, index), rank
                if self._got_tied[got] < len(self._peers.gradient_senders(stage, index)):
                    return False
                self._got_tied.pop(got, None)
            if op is Op.STEP and self._normed:
                return all((one, index, ranks[0]) in self._norms
                           for one, ranks in enumerate(self._rounds.placement) if rank not in ranks)
        return True

    def _has(self, receive: Action, source: int, rank: int) -> bool:
        """Tell whether the input of a forward or a backward from another rank's stage has arrived."""
        return (self._peers.rank_of(source, receive.microbatch) in (-1, rank)
                or (receive, rank) in self._arrived)


def in_one_order(deps: Dependencies) -> tuple[Schedule, Mapping[int, Action]]:
    """Return a lowered schedule with its receives in the common order, and the ranks that cannot reach their end."""
    schedule = deps.schedule
    order = TransferOrder(schedule.rounds, schedule.ties, [iter(program) for program in schedule.programs],
                          lambda rank, owner, microbatch: deps.version.get((owner, microbatch), 0),
                          normed=deps.normed, ranks=range(schedule.ranks))
    return schedule.with_programs([list(order.program(rank)) for rank in range(schedule.ranks)]), order.stuck
