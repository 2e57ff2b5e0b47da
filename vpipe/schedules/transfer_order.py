"""Order the transfers of a schedule, so that no rank waits for ever, whatever the transport.

:func:`post_in_time` serves transports with a channel per kind and pair of ranks, such as gloo: receives are posted
early enough, in the order of sending. :class:`TransferOrder` serves nccl: all ranks keep to one sequence of transfers.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

from vpipe.schedules.action import RECEIVES, RETURNS, SENDS, Action, Op
from vpipe.schedules.dependencies import Dependencies, OnRank, TransferPeers
from vpipe.schedules.schedule import Rounds, Schedule

Channel = tuple[int, int, Op]
"""Sender, receiver, and what is sent."""


def post_in_time(schedule: Schedule) -> Schedule:
    """Return a lowered schedule with receives moved forward where a transport without buffers or tags needs it.

    Every rank goes as far as it can while sends wait for their receives. When no rank can go on, the receives that
    sends wait for are posted where the receiving ranks stand. So only receives that would deadlock are moved; the
    others stay right before their use. The receives of a channel are posted in the order of its sends, whatever the
    order in which their tensors are used.

    A schedule that deadlocks even with buffers is returned unchanged.
    """
    return _Posting(schedule).moved()


class _Posting:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._deps = schedule, Dependencies.from_schedule(schedule)
        self._programs: list[list[Action]] = [[] for _ in schedule.programs]  # with the receives moved
        self._cursors = [0] * schedule.ranks  # in the programs that came
        self._done: set[OnRank] = set()
        self._late: dict[int, list[Action]] = defaultdict(list)  # receives that wait for earlier ones of their channel
        self._sleepers: dict[OnRank, list[int]] = defaultdict(list)  # ranks to wake when an action is done
        self._awake = list(range(schedule.ranks))
        self._orders: dict[Channel, list[Action]] = defaultdict(list)  # receives of a channel as they are sent
        self._posted: dict[Channel, int] = defaultdict(int)  # how many of them are posted
        self._places: dict[Action, tuple[Channel, int]] = {}
        for action, (rank, _) in self._deps.actions():
            if action.op in (Op.SEND_F, Op.SEND_B):
                for receive, peer in self._deps.peers.other_ends(action, rank):
                    channel = rank, peer, action.op
                    self._places[receive] = channel, len(self._orders[channel])
                    self._orders[channel].append(receive)

    def moved(self) -> Schedule:
        while self._awake:
            while self._awake:
                self._go_on(self._awake.pop())
            for receive, rank in list(self._overdue()):
                if (receive, rank) not in self._done:
                    self._emit(receive, rank)
        ended = all(cursor == len(program)
                    for cursor, program in zip(self._cursors, self._schedule.programs, strict=True))
        return self._schedule.with_programs(self._programs) if ended else self._schedule

    def _go_on(self, rank: int) -> None:
        """Let a rank go as far as it can."""
        program = self._schedule.programs[rank]
        while self._cursors[rank] < len(program):
            action = program[self._cursors[rank]]
            if action.op in RECEIVES:
                if (action, rank) not in self._done:
                    self._post(action, rank)
            else:
                received = ((receive, rank) for receive in self._deps.receives(action, rank))
                for awaited in chain(received, self._deps.awaited(action, rank, rendezvous=True)):
                    if awaited not in self._done:
                        self._sleepers[awaited].append(rank)
                        return
                self._emit(action, rank)
                if action.op is Op.FORWARD:
                    for late in self._late.pop(rank, ()):
                        self._post(late, rank)
            self._cursors[rank] += 1

    def _overdue(self) -> Iterator[OnRank]:
        """Yield the receives that sends wait for."""
        for rank, cursor in enumerate(self._cursors):
            program = self._schedule.programs[rank]
            if cursor < len(program) and program[cursor].op in SENDS:
                yield from (one for one in self._deps.awaited(program[cursor], rank, rendezvous=True)
                            if one not in self._done and self._deps.position(*one) is not None)

    def _post(self, receive: Action, rank: int) -> None:
        """Post a receive behind those of earlier sends; later, when one of these cannot be posted yet."""
        if receive not in self._places:  # the exchange of a tied weight keeps its order by itself
            self._emit(receive, rank)
            return
        channel, place = self._places[receive]
        for earlier in self._orders[channel][self._posted[channel]:place + 1]:
            if any((maker, rank) not in self._done for maker in self._deps.makers(earlier, rank)):
                self._late[rank].append(receive)
                return
            self._emit(earlier, rank)

    def _emit(self, action: Action, rank: int) -> None:
        self._programs[rank].append(action)
        self._done.add((action, rank))
        if action in self._places:
            self._posted[self._places[action][0]] += 1
        self._awake += self._sleepers.pop((action, rank), ())


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
        self._awake = [(0, rank) for rank, action in enumerate(self._next) if action is not None]  # a heap
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
        ranks = self._rounds.placement[action.stage]
        self._arrived_at[action].add(rank)
        self._asleep.add(rank)
        if len(self._arrived_at[action]) < len(ranks):
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
                if receive.op is Op.RECV_W:
                    self._versions[peer, receive.stage] = receive.microbatch
                elif receive.op is Op.RECV_G:
                    self._got_tied[receive, peer] += 1
                else:
                    self._arrived.add((receive, peer))
                self._wake(peer)
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
        return self._peers.rank_of(source, receive.microbatch) in (-1, rank) or (receive, rank) in self._arrived


def in_one_order(deps: Dependencies) -> tuple[Schedule, Mapping[int, Action]]:
    """Return a lowered schedule with its receives in the common order, and the ranks that cannot reach their end."""
    schedule = deps.schedule
    order = TransferOrder(schedule.rounds, schedule.ties, [iter(program) for program in schedule.programs],
                          lambda rank, owner, microbatch: deps.version.get((owner, microbatch), 0),
                          normed=deps.normed, ranks=range(schedule.ranks))
    return schedule.with_programs([list(order.program(rank)) for rank in range(schedule.ranks)]), order.stuck
