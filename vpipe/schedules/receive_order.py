"""Post the receives of a schedule early enough that no send waits for ever, in the order of sending.

This is for transports with a channel per kind and pair of ranks, such as gloo. For nccl see
:mod:`vpipe.schedules.transfer_order`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from vpipe.schedules.action import RECEIVES, SENDS, Action, Op
from vpipe.schedules.dependencies import Dependencies, OnRank
from vpipe.schedules.schedule import Schedule

Channel = tuple[int, int, Op]
"""Sender, receiver, and what is sent."""


def post_in_time(schedule: Schedule) -> Schedule:
    """Move receives of a lowered schedule forward where a transport without buffers or tags needs it.

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
        self._awake: list[int] = []
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
        self._awake = list(range(self._schedule.ranks))
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
                for awaited in self._needs(action, rank):
                    if awaited not in self._done:
                        self._sleepers[awaited].append(rank)
                        return
                self._emit(action, rank)
                if action.op is Op.FORWARD:
                    for late in self._late.pop(rank, ()):
                        self._post(late, rank)
            self._cursors[rank] += 1

    def _needs(self, action: Action, rank: int) -> Iterator[OnRank]:
        yield from ((receive, rank) for receive in self._deps.receives(action, rank))
        yield from self._deps.awaited(action, rank, rendezvous=True)

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
