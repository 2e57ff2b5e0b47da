"""Order the transfers of a schedule, so that no rank waits for ever, whatever the transport.

:func:`post_in_time` serves transports with a channel per kind and pair of ranks, such as gloo: receives are posted
early enough, in the order of sending. :class:`TransferOrder` serves nccl: all ranks keep to one sequence of transfers;
:class:`StreamOrder` does where they repeat themselves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import islice

from vpipe.errors import UserError
from vpipe.schedules.action import Action, Kind
from vpipe.schedules.assignment import Assignment, Setting, stages_of_rank
from vpipe.schedules.graph import Flow, OnRank, other_ends
from vpipe.schedules.schedule import Schedule


def post_in_time(schedule: Schedule) -> Schedule:
    """Return a lowered schedule with receives moved forward where a transport without buffers or tags needs it.

    Every rank goes as far as it can while sends wait for their receives. When no rank can go on, the receives that
    sends wait for are posted where the receiving ranks stand. So only receives that would deadlock are moved; the
    others stay right before their use. The receives of a channel are posted in the order of its sends, whatever the
    order in which their tensors are used.

    A schedule that deadlocks even with buffers is returned unchanged.
    """
    posting = _ReceivePlacement(schedule)
    while posting.awake:
        while posting.awake:
            posting.go_on(posting.awake.pop())
        for receive, rank in list(posting.overdue()):
            if (receive, rank) not in posting.done:
                posting.post(receive, rank)
    ended = all(cursor == len(program) for cursor, program in zip(posting.cursors, schedule.programs, strict=True))
    return schedule.with_programs(posting.programs) if ended else schedule


class _ReceivePlacement:
    """The programs so far, with their receives moved, and how far each rank has come in the program that it had."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._graph, ranks = schedule, schedule.graph, schedule.ranks
        self.programs: list[list[Action]] = [[] for _ in range(ranks)]
        self.cursors = [0] * ranks
        self.done: set[OnRank] = set()
        self.awake = list(range(ranks))
        self._late: dict[int, list[Action]] = defaultdict(list)  # receives that wait for earlier ones of their channel
        self._sleepers: dict[OnRank, list[int]] = defaultdict(list)  # ranks to wake when an action is done
        # By receive, those of its channel (sender, receiver, kind) that are not posted yet, in the order of sending.
        self._unposted: dict[Action, deque[Action]] = {}
        channels: dict[tuple[int, int, Kind], deque[Action]] = defaultdict(deque)
        for action, (rank, _) in schedule.actions():
            if action.op.sends and action.op.per_microbatch:
                for receive, peer in other_ends(schedule.setting, action, rank):
                    self._unposted[receive] = channels[rank, peer, action.op]
                    self._unposted[receive].append(receive)

    def go_on(self, rank: int) -> None:
        program = self._schedule.programs[rank]
        while self.cursors[rank] < len(program):
            action = program[self.cursors[rank]]
            if action.op.receives:
                if (action, rank) not in self.done:
                    self._post_in_order(action, rank)
            else:
                for awaited in self._awaited(action, rank, self.cursors[rank]):
                    if awaited not in self.done:
                        self._sleepers[awaited].append(rank)
                        return
                self.post(action, rank)
                if action.op.uses_version:
                    for late in self._late.pop(rank, ()):
                        self._post_in_order(late, rank)
            self.cursors[rank] += 1

    def _awaited(self, action: Action, rank: int, position: int) -> Iterator[OnRank]:
        """Yield the receives that an action needs, and what it waits for."""
        for before in self._graph.before(action, (rank, position)):
            if before.op.receives:
                yield before, rank
        yield from self._graph.awaited(action, rank, rendezvous=True)

    def overdue(self) -> Iterator[OnRank]:
        """Yield the receives that sends wait for."""
        for rank, cursor in enumerate(self.cursors):
            program = self._schedule.programs[rank]
            if cursor < len(program) and program[cursor].op.sends:
                yield from (one for one in self._graph.awaited(program[cursor], rank, rendezvous=True)
                            if self._graph.position(*one) is not None)

    def _post_in_order(self, receive: Action, rank: int) -> None:
        """Post a receive after those of earlier sends; later, when one of these cannot be posted yet."""
        if receive not in self._unposted:  # the exchange of a tied weight keeps its order by itself
            self.post(receive, rank)
        while receive in (unposted := self._unposted.get(receive, deque())):
            position = self._graph.position(unposted[0], rank)
            if any((maker, rank) not in self.done for maker in self._graph.before(unposted[0], (rank, position or 0))):
                self._late[rank].append(receive)
                return
            self.post(unposted[0], rank)

    def post(self, action: Action, rank: int) -> None:
        """Put an action at the end of its rank's new program."""
        self.programs[rank].append(action)
        self.done.add((action, rank))
        if unposted := self._unposted.get(action):
            unposted.popleft()
        self.awake += self._sleepers.pop((action, rank), ())


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
        setting: the pipeline.
        programs: of every rank, lowered; their own receives are left out.
        ranks: whose actions are wanted; those of the others are made and forgotten.
    """

    def __init__(self, setting: Setting, programs: Sequence[Iterator[Action]], ranks: Collection[int]) -> None:
        self._setting, self._flow = setting, Flow(setting, one_order=True)
        self._programs = [(action for action in program if not action.op.receives) for program in programs]
        self._placed: dict[int, deque[Action]] = {rank: deque() for rank in ranks}
        self._next: list[Action | None] = [next(program, None) for program in self._programs]
        self._awake = [(0, rank) for rank, action in enumerate(self._next) if action is not None]  # a heap
        self._now = 0
        self._asleep: set[int] = set()
        self._arrived_at: dict[Action, set[int]] = defaultdict(set)  # ranks that have come to a sum over replicas

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

    def standing(self, done: int) -> Hashable:
        """Return before which action every rank stands, counted from microbatch ``done`` on, and in how long it goes
        on; None for one that is asleep."""
        goes_on = {rank: at - self._now for at, rank in self._awake}
        return tuple(action and (action.op, action.stage, goes_on.get(rank),
                                 action.index * _microbatches(action, self._setting.assignment) - done)
                     for rank, action in enumerate(self._next))

    def _go_on(self) -> None:
        """Carry out one action, of the rank whose clock shows the earliest time."""
        self._now, rank = heappop(self._awake)
        action = self._next[rank]
        assert action is not None, "a rank at the end of its program is not awake"
        if action.op.summed:
            self._sum(action, rank)
        elif self._flow.missing(action, rank) is None:
            self._place(action, rank)
            for receive, peer in other_ends(self._setting, action, rank) if action.op.sends else ():
                self._place(receive, peer)
            self._pass(action, rank)
        else:
            self._asleep.add(rank)

    def _pass(self, action: Action, rank: int) -> None:
        """Take note of an action, wake the ranks that may wait for it, and let its own come to the next one."""
        woken = self._flow.follow(action, rank)
        for sleeper in woken if action.op.per_microbatch else sorted(self._asleep):
            if sleeper in self._asleep:
                self._asleep.remove(sleeper)
                heappush(self._awake, (self._now, sleeper))
        self._next[rank] = next(self._programs[rank], None)
        if self._next[rank] is not None:  # a whole backward takes as long as its halves together
            ticks = action.op.computes * (1 + action.op.whole_backward)
            heappush(self._awake, (self._now + ticks, rank))

    def _sum(self, action: Action, rank: int) -> None:
        """Carry out a sum over replicas, as one transfer, when all of them have come to it."""
        ranks = self._setting.placement[action.stage]
        self._arrived_at[action].add(rank)
        self._asleep.add(rank)
        if len(self._arrived_at[action]) < len(ranks):
            return
        del self._arrived_at[action]
        self._awake = [entry for entry in self._awake if entry[1] not in ranks]  # who was woken meanwhile
        heapify(self._awake)
        self._asleep.difference_update(ranks)
        for replica in ranks:
            self._place(action, replica)
            self._pass(action, replica)

    def _place(self, action: Action, rank: int) -> None:
        if rank in self._placed:
            self._placed[rank].append(action)


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
        return action._replace(index=action.index + microbatches // _microbatches(action, self._assignment))


def _microbatches(action: Action, assignment: Assignment) -> int:
    """Return how many microbatches the index of an action counts as."""
    return 1 if action.op.per_microbatch else assignment.per_update(action.stage)


def in_one_order(schedule: Schedule) -> tuple[Schedule, Mapping[int, Action]]:
    """Return a lowered schedule with its receives in the common order, and the ranks that cannot reach their end."""
    order = TransferOrder(schedule.setting, [iter(program) for program in schedule.programs], range(schedule.ranks))
    return schedule.with_programs([list(order.program(rank)) for rank in range(schedule.ranks)]), order.stuck
