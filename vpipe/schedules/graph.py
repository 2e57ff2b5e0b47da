"""The graph of a schedule: which action waits for which, derived from what their kinds need and make.

:class:`Graph` is of programs that are known to their end, :class:`Flow` of programs that are followed action by action,
as a stream is. Both know of no kind: what they say follows from the rows of :mod:`vpipe.schedules.kinds`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

from vpipe.errors import UserError
from vpipe.schedules import kinds
from vpipe.schedules.assignment import Setting
from vpipe.schedules.kinds import EXCHANGED, PART, Action, Kind, Needed, Value

Spot = tuple[int, int]
"""The place of an action: (rank, position in its program). The position after the last action is the end."""

OnRank = tuple[Action, int]
"""An action and the rank that executes it."""


def other_ends(setting: Setting, transfer: Action, rank: int) -> list[OnRank]:
    """Return the other ends of a send or a receive; none when it leads out of the pipeline.

    Activations and their gradients have no other end on their own rank. Tied weights do: there they change hands.
    """
    end = transfer.op.transfer
    assert end is not None, "it is a send or a receive"
    other = Action(transfer.op.other_end, transfer.stage + end.offset, transfer.index)
    return [(other, peer) for peer in end.peers(setting, transfer.stage, transfer.index, rank)]


def carried(carrier: Kind, stage: int, index: int) -> Action:
    """Return the send of a value, which is of a stage and an index."""
    assert carrier.transfer is not None, "it sends"
    return Action(carrier, stage - carrier.transfer.value_offset, index)


def receive_of(send: Action) -> Action:
    assert send.op.transfer is not None, "it is a send"
    return Action(send.op.other_end, send.stage + send.op.transfer.offset, send.index)


class Graph:
    """Hold tables made in one pass over the programs of a schedule, and tell which action waits for which.

    Attributes:
        makers: the kinds that make a value, each with the stage of the value less that of its action: those that are
            present; the first of all where none is.
        where: the spots of every action.
        last: by stage, update and rank, the rank's last action (B or W) that makes weight gradients for it.

    Args:
        present: the kinds of the actions.
    """

    def __init__(self, programs: Sequence[Sequence[Action]], setting: Setting, present: Collection[Kind]) -> None:
        self.programs, self.setting = programs, setting
        self.makers: dict[Value, list[tuple[Kind, int]]] = {}
        for kind in sorted(kinds.known(), key=lambda kind: kind not in present):
            for value, offset in kind.makes:
                if kind in present or value not in self.makers:
                    self.makers.setdefault(value, []).append((kind, offset))
        self.where: dict[Action, tuple[Spot, ...]] = {}
        self.last: dict[tuple[int, int, int], Action] = {}
        where, last = self.where, self.last
        per_update = [setting.assignment.per_update(stage) for stage in range(len(setting.placement))]
        for rank, program in enumerate(programs):
            for position, action in enumerate(program):
                op, stage, index = action
                where[action] = (*where.get(action, ()), (rank, position))
                if op.completes and stage < len(per_update) and per_update[stage]:
                    last[stage, index // per_update[stage], rank] = action

    def position(self, action: Action, rank: int) -> int | None:
        """Return the position of ``action`` in the program of ``rank``; None when it is not there."""
        for there, position in self.where.get(action, ()):
            if there == rank:
                return position
        return None

    def maker(self, value: Value, stage: int, index: int, rank: int, before: int | None = None) -> Action | None:
        """Return the action that makes a value on a rank, whether or not it is there; None where none has to.

        Args:
            before: the position where it is needed: of several the last one before it.
        """
        if value is PART:
            return self.last.get((stage, index, rank))
        if value not in self.makers:
            raise UserError(f"no kind of action makes the value '{value.name}'",
                            hint="let a kind's row say that it makes it, and register that kind")
        (kind, offset), *others = self.makers[value]
        first = Action(kind, stage - offset, index)
        if not others and not value.optional:
            return first
        latest, found = -1, None
        for kind, offset in self.makers[value]:
            position = self.position(action := Action(kind, stage - offset, index), rank)
            if position is not None and (found is None or (
                    before is not None and position < before and not position < latest < before)):
                latest, found = position, action
        return first if found is None and not value.optional else found

    def before(self, action: Action, spot: Spot) -> Iterator[Action]:
        """Yield the actions that the one at ``spot`` must follow on its own rank.

        These make values that it needs, get ready for those that come from elsewhere, or hand them over here.
        """
        setting, (rank, at) = self.setting, spot
        receives, handed_over = [], []
        for value, stage, index in action.op.needs(setting, action.stage, action.index, rank):
            for home in (rank,) if value.homes is None else value.homes(setting, stage, index, rank):
                if home == rank and not value.handed_over:
                    if (maker := self.maker(value, stage, index, rank, at)) is not None:
                        yield maker
                elif setting.is_lowered and value.carrier is not None:
                    send = carried(value.carrier, stage, index)
                    receives.append(receive_of(send))
                    handed_over += [send] * (home == rank)
        yield from receives
        yield from handed_over

    def awaited(self, action: Action, rank: int, rendezvous: bool) -> list[OnRank]:
        """Return the actions, besides those before it on its rank, that must be executed before ``action`` can be.

        A receive only posts; the action that uses the tensor waits for the send. A compute-only schedule has no sends:
        there it waits for the action that makes the tensor. With ``rendezvous`` sends wait for their receives.
        """
        op, setting = action.op, self.setting
        if op.transfer is not None:
            return [other for other in other_ends(self.setting, action, rank) if other[1] != rank] \
                if rendezvous and op.sends else []
        found: list[OnRank] = []
        for value, stage, index in op.needs(setting, action.stage, action.index, rank):
            for home in () if value.homes is None else value.homes(setting, stage, index, rank):
                if home == rank and not value.handed_over:
                    continue
                needed: Iterable[Needed] = [(value, stage, index)]
                if value.carrier is not None and (setting.is_lowered or value not in self.makers):
                    send = carried(value.carrier, stage, index)
                    if setting.is_lowered:
                        found.append((send, home))
                        continue
                    needed = send.op.needs(setting, send.stage, index, home)
                found += [(maker, home) for each in needed if (maker := self.maker(*each, home)) is not None]
        return found

    @cached_property
    def waits(self) -> Sequence[Sequence[Sequence[Spot | None]]]:
        """By rank and position, the spots of :meth:`awaited` without ``rendezvous``; None for one that is missing."""
        return [[() if action.op.transfer is not None else self.spots(self.awaited(action, rank, rendezvous=False))
                 for action in program]
                for rank, program in enumerate(self.programs)]

    def spots(self, actions: Sequence[OnRank]) -> Sequence[Spot | None]:
        """Return where actions stand; None for one that is missing."""
        return [None if (position := self.position(action, rank)) is None else (rank, position)
                for action, rank in actions] if actions else ()


def execute(graph: Graph, *, rendezvous: bool) -> tuple[list[int], dict[int, tuple[Action, Action, int]]]:
    """Execute a schedule without time and tensors: every rank goes as far as it can, in whatever order of turns.

    Args:
        rendezvous: a send waits until its receive is posted; otherwise it never waits (buffered).

    Returns:
        How many actions each rank executed, and of the ranks that did not reach their end the action before which they
        stand, the one that they wait for, and its rank.
    """
    programs, waits = graph.programs, graph.waits
    cursors = [0] * len(programs)
    blocked: dict[int, tuple[Action, Action, int]] = {}
    sleepers: dict[Spot, list[int]] = defaultdict(list)  # ranks to wake when a spot has been executed
    awake = list(range(len(programs)))
    while awake:
        rank = awake.pop()
        blocked.pop(rank, None)
        while cursors[rank] < len(programs[rank]):
            action = programs[rank][cursors[rank]]
            spots = waits[rank][cursors[rank]]
            if rendezvous and action.op.sends:
                spots = graph.spots(graph.awaited(action, rank, rendezvous=True))
            for number, spot in enumerate(spots):
                if spot is None or spot[1] >= cursors[spot[0]]:
                    blocked[rank] = action, *graph.awaited(action, rank, rendezvous)[number]
                    if spot is not None:
                        sleepers[spot].append(rank)
                    break
            if rank in blocked:
                break
            if sleepers:
                awake += sleepers.pop((rank, cursors[rank]), ())
            cursors[rank] += 1
    return cursors, dict(sorted(blocked.items()))


class Flow:
    """What programs that are followed action by action have sent and published so far, and what they wait for.

    Nothing is asked about microbatches beyond the action at hand, which may not exist. What has been used is forgotten.

    Args:
        one_order: all transfers keep to one order.
    """

    def __init__(self, setting: Setting, *, one_order: bool = False) -> None:
        self._setting, self._one_order = setting, one_order
        self._arrived: set[tuple[Value, int, int, int]] = set()  # of microbatches: value, stage, index, receiver
        self._newest: dict[tuple[Value, int, int, int], int] = {}  # of updates: by value, stage, maker, receiver
        self._parts: Counter[tuple[int, int, int]] = Counter()  # gradients of an update: stage, update, replica

    def missing(self, action: Action, rank: int) -> tuple[Value, int, int, int] | None:
        """Return a value from another rank that an action waits for, with its stage, index and maker.

        When nothing is missing, the action is executed next: what it alone uses is forgotten.
        """
        op, setting = action.op, self._setting
        if op.transfer is not None:
            if self._one_order:
                value, stage, index = op.transfer.value, action.stage, action.index
                for home in op.transfer.before(setting, stage, index, rank):
                    if self._newest.get((value, stage, home, setting.placement[stage][0]), -1) < index:
                        return value, stage, index, home
            return None
        used = []
        for value, stage, index in op.needs(setting, action.stage, action.index, rank):
            if value.homes is not None:
                for home in value.homes(setting, stage, index, rank):
                    if home != rank or value.handed_over:
                        if not self._is_there(value, stage, index, home, rank):
                            return value, stage, index, home
                        used.append((value, stage, index, rank))
        if used and (op.uses_version or op.returns):  # the last that needs it
            self._arrived.difference_update(used)
        return None

    def _is_there(self, value: Value, stage: int, index: int, home: int, rank: int) -> bool:
        if value is PART:
            return self._parts[stage, index, home] == len(self._setting.assignment.share(stage, index, stage, home))
        carrier = value.carrier
        if carrier is not None and carrier.per_microbatch:
            return (value, stage, index, rank) in self._arrived
        return (self._newest.get((value, stage, home, rank if carrier is not None else home), -1) >= index
                or (value, stage, index, home) in self._arrived)

    def follow(self, action: Action, rank: int) -> Sequence[int]:
        """Take note of an action that has been executed; return the ranks to which it has sent something."""
        op, stage, index = action
        if op.sends:
            assert op.transfer is not None, "it sends"
            value, at = op.transfer.value, stage + op.transfer.value_offset
            peers = op.transfer.peers(self._setting, stage, index, rank)
            for peer in peers:
                if op.per_microbatch:
                    self._arrived.add((value, at, index, peer))
                else:
                    self._newest[value, at, rank, peer] = index
            return peers
        if op.completes:
            assignment = self._setting.assignment
            if assignment.width(stage) > 1:
                self._parts[stage, assignment.update_of(stage, index), rank] += 1
        elif not op.per_microbatch:
            for value, offset in op.makes:
                self._newest[value, stage + offset, rank, rank] = index
            # By then all replicas have summed; where each sums what it owns alone, its step comes too early.
            if (EXCHANGED, 0) in op.makes if self._setting.zero1 else op.makes_version:
                self._parts.pop((stage, index, rank), None)
        elif not op.is_own:  # what ranks may need without a transfer
            self._arrived.update((value, stage + offset, index, rank) for value, offset in op.makes
                                 if value.homes is not None and value.carrier is None and value is not PART)
        return ()
