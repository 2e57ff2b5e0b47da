"""Lower compute actions to the actions that a rank executes.

Lowering adds the transfers between stages, the sums over replicas, the exchange of tied weights and the norms for
global clipping. It works lazily and on one rank at a time, so that a stream of unknown length can be lowered while it
runs.

A receive is posted before the compute action *preceding* the one that needs it, so that the transfer happens during
that action. A send stands right after the action that made the tensors. Stages on the same rank pass tensors without a
transfer.

No rank may wait for ever, whatever the transport. :func:`post_in_time` serves transports with a channel per kind and
pair of ranks, such as gloo: receives are posted early enough, in the order of sending. :class:`TransferOrder` serves
nccl: all ranks keep to one sequence of transfers.

A tied weight belongs to the first stage that uses it; other stages borrow it:

* The owner sends a version right after the step that makes it. The borrower's forward of a microbatch uses the version
  that the owner's forward used. With replicas, every borrowing rank gets it from one of the owner's ranks.
* A rank sends the gradients of an update when its borrowing stages have all of them, to all of the owner's replicas.
  These add them to their own before the step.
* Without a flush the owner posts their receives as soon as it has made the update before, or one before that.
* A rank posts the receive of a version right after the gradients that go into it. Later would deadlock without a flush
  when sends wait for their receives: the borrower comes to its next gradient before it needs the version, and the owner
  sends the version before it takes that gradient.

These actions also stand where owner and borrower share a rank; there the tensors change hands. The norms of all stages
of a rank are published before the first of them steps, since each step needs them all. An owner's step waits for the
gradients of a borrower on the same rank.

The replicas of a stage send each other the gradients of an update after its last backward or weight half. Before the
step each sums its share of them (REDUCE_GRAD) and sends the sum to the others; the step waits for theirs. With ZeRO-1
each sums, and steps, the parameters that it owns, and sends their weights to the others (GATHER_W, behind the step).

Where the weights of stages are divided over lanes, those of a stage are gathered before its first forward of an update
(UNSHARD), and given back (RESHARD) once lanes have summed its gradients, before the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, islice

from vpipe.schedules.assignment import Setting, default_warmup, stages_of_rank
from vpipe.schedules.graph import Flow, OnRank, carried, other_ends, receive_of
from vpipe.schedules.kinds import UPDATE, Action, Kind, Op
from vpipe.schedules.schedule import Schedule


class Lowering:
    """Lower the program of one rank.

    Args:
        setting: of the lowered program; it says what updates exchange.
        compute: returns the compute program of the rank, from its beginning.
        warmup: forwards of a replica of every stage before its first backward, where it is a stream.
    """

    def __init__(self, setting: Setting, rank: int, compute: Callable[[], Iterator[Action]],
                 warmup: Sequence[int] = ()) -> None:
        assignment, ties = setting.assignment, setting.ties
        self._assignment, self._rank, self._compute, self._warmup = assignment, rank, compute, warmup
        self._stages = stages_of_rank(assignment.placement, rank)
        self._gathered = dict.fromkeys(self._stages, -1)
        self._ties = {owner: borrowers for owner, borrowers in ties.items() if owner in self._stages and borrowers}
        # Without ties, whose versions are asked for only when they are used.
        self._setting = replace(setting, ties={})
        self._lent = {owner for owner in self._ties if setting.lending.get((owner, rank))}
        self._borrowers = {owner: sorted(here) for owner, borrowers in ties.items()
                           if (here := set(borrowers) & set(self._stages))}
        self._completed: Counter[tuple[int, int, int]] = Counter()  # gradients there, by (owner, update, borrower)
        self._closed = dict.fromkeys(self._borrowers, 0)  # updates of the owner that got all of this rank's gradients
        # Where a step waits for other replicas, other ranks must be able to send past it.
        self._ahead = 2 if not assignment.flush and any(assignment.width(stage) > 1 for stage in self._stages) else 1
        # Receives of activations that are posted earlier still, and the forwards that they are for.
        self._early_receives = self._surplus() if warmup else 0
        self._forwards = (action for action in compute() if action.op.uses_version)
        self._forwards_met = self._receives_met = 0
        self._steps: list[Action] = []  # that wait for the rank's other stages
        self._steps_alone = not (setting.normed or setting.sharded or self._borrowers or self._ties
                                 or any(assignment.width(stage) > 1 for stage in self._stages))
        self._followers: dict[Action, list[Action]] = defaultdict(list)  # what comes right after a step
        self._sent_behind: dict[Kind, list[tuple[Kind, int]]] = {}  # sends, with the stage of each less the action's

    def program(self) -> Iterator[Action]:
        delayed: deque[Action] = deque()
        for owner in self._borrowers:
            yield from self._close(owner)
        for owner in self._ties:
            for update in range(self._early(owner)):
                yield from self._await_gradients(owner, update)
        for action in self._compute():
            if action.op.returns:
                # The shapes of a gradient are known once its forward has run, not earlier.
                while any(one.index == action.index and one.stage == action.stage and one.op.uses_version
                          for one in delayed):
                    yield from self._with_sends(delayed.popleft())
            yield from self._before(action)
            # Inputs of the action after a step arrive during the compute before it, which is longer; so with an R.
            if action.op.long:
                while delayed and (self._ahead == 1 or not delayed[0].op.long
                                   or sum(one.op.long for one in delayed) >= self._ahead):
                    yield from self._with_sends(delayed.popleft())
            delayed.append(action)
        while delayed:
            yield from self._with_sends(delayed.popleft())
        for owner in self._borrowers:
            yield from self._close(owner, ended=True)
        yield from self._take_steps()

    def _surplus(self) -> int:
        """Return how many more microbatches than in 1F1B the previous stage sends before it waits for a gradient."""
        widths = list(map(len, self._assignment.placement))
        more = [depth - least for depth, least in zip(self._warmup, default_warmup(widths), strict=True)]
        return max((-(-more[stage - 1] * widths[stage - 1] // widths[stage]) - more[stage] for stage in self._stages
                    if stage), default=0)

    def _before(self, action: Action) -> Iterable[Action]:
        """Return the receives that ``action`` needs."""
        op, stage, index = action
        if op.makes_version:
            return (Action(Op.RECV_G, stage, index),) if stage in self._ties and self._assignment.flush else ()
        if op.uses_version and self._early_receives:
            return self._receive_early()
        return self._receives(action) if op.per_microbatch else ()

    def _receives(self, action: Action) -> list[Action]:
        """Return the receives of what an action needs from other ranks, but for tied weights."""
        rank, found = self._rank, []
        for value, stage, index in action.op.needs(self._setting, action.stage, action.index, rank):
            if value.carrier is not None and value.homes is not None and not value.handed_over:
                for home in value.homes(self._setting, stage, index, rank):
                    if home != rank:
                        found.append(receive_of(carried(value.carrier, stage, index)))
        return found

    def _receive_early(self) -> Iterator[Action]:
        """Yield the receives of the activations for the next forward and the ones after it, so far as none is yet."""
        self._forwards_met += 1
        for forward in islice(self._forwards, self._forwards_met + self._early_receives - self._receives_met):
            self._receives_met += 1
            yield from self._receives(forward)

    def _with_sends(self, action: Action) -> Iterable[Action]:
        """Return an action, when it may be executed, and what is sent after it."""
        op, stage, index = action
        if op.makes_version:
            if self._steps_alone:
                return (action,)
            self._steps.append(action)
            return self._take_steps()
        if op.counts == UPDATE and (due := Action(Op.STEP, stage, index)) in self._steps:
            self._followers[due].append(action)
            return ()
        actions = [action]
        if self._setting.sharded and op.uses_version and (update := self._assignment.update_of(stage, index)) \
                > self._gathered[stage]:
            self._gathered[stage] = update
            actions = [Action(Op.UNSHARD, stage, update), action]
        if op not in self._sent_behind:
            self._sent_behind[op] = [(carrier, offset - carrier.transfer.value_offset) for value, offset in op.makes
                                     if (carrier := value.carrier) is not None and carrier.transfer is not None
                                     and not value.handed_over]
        for carrier, offset in self._sent_behind[op]:
            assert carrier.transfer is not None, "it sends"
            if carrier.transfer.peers(self._setting, stage + offset, index, self._rank):
                actions.append(Action(carrier, stage + offset, index))
        if self._borrowers and op.completes:
            return chain(actions, self._complete(action))
        return actions

    def _complete(self, action: Action) -> Iterator[Action]:
        """Note the gradients of a microbatch for the weights that its stage borrows."""
        for owner, here in self._borrowers.items():
            if action.stage in here:
                self._completed[owner, self._assignment.update_of(owner, action.index), action.stage] += 1
                yield from self._close(owner)
        yield from self._take_steps()

    def _close(self, owner: int, ended: bool = False) -> Iterator[Action]:
        """Send the gradients of the owner's next updates that are complete, and post receives for the new versions.

        An update that takes no microbatch of this rank waits for nothing from it.
        """
        while (self._has_gradients(owner, update := self._closed[owner], ended)
               and self._assignment.has_update(owner, update)):
            for borrower in self._borrowers[owner]:
                self._completed.pop((owner, update, borrower), None)
            self._closed[owner] += 1
            if self._assignment.share(owner, update, self._borrowers[owner][0], self._rank):
                yield Action(Op.SEND_G, owner, update)
            yield Action(Op.RECV_W, owner, update + 1)

    def _early(self, owner: int) -> int:
        """Return for how many updates the owner posts receives of gradients ahead.

        Where a replica waits for others, a rank that sends to it may be as many updates ahead as the replica has
        microbatches in flight. Otherwise that rank would wait for the replica while the replica waits for it.
        """
        if all(len(ranks) == 1 for ranks in self._assignment.placement):
            return 1
        depths = self._warmup or default_warmup(list(map(len, self._assignment.placement)))
        return depths[owner] // self._assignment.update_every + 1

    def _await_gradients(self, owner: int, update: int) -> Iterator[Action]:
        """Post, without a flush, the receive of the borrowers' gradients of an update before they can send them."""
        if not self._assignment.flush and self._assignment.has_update(owner, update):
            yield Action(Op.RECV_G, owner, update)

    def _has_gradients(self, owner: int, update: int, ended: bool) -> bool:
        per_update = self._assignment.per_update(owner)
        complete = range(update * per_update, (update + 1) * per_update)
        for borrower in self._borrowers[owner]:
            done = self._completed[owner, update, borrower]
            if not (done or ended) and self._assignment.taken(complete, borrower, self._rank):
                return False  # to ask whether more microbatches exist would read the data too early
            if done != len(self._assignment.share(owner, update, borrower, self._rank)):
                return False
        return True

    def _take_steps(self) -> Iterator[Action]:
        """Yield the steps that need not wait any longer, each with its version for the borrowers.

        A step waits for the gradients of the stages of this rank that borrow its weights.
        """
        ready = [step for step in self._steps if step.index < self._closed.get(step.stage, step.index + 1)]
        if self._setting.normed and self._setting.norms_of_all and len(ready) < len(self._stages):
            return
        for step in ready:
            if self._setting.sums(step.stage):
                yield Action(Op.REDUCE, step.stage, step.index)
            if self._setting.sharded:
                yield Action(Op.RESHARD, step.stage, step.index)
        replicated = [step for step in ready if self._assignment.width(step.stage) > 1]
        if self._setting.normed:
            yield from (Action(Op.NORM, step.stage, step.index)
                        for step in (ready if self._setting.norms_of_all else replicated))
        gathers = [Action(Op.GATHER, step.stage, step.index) for step in replicated if self._setting.zero1]
        for step in ready:
            self._steps.remove(step)
            yield step
            if not gathers:
                yield from self._behind(step)
        yield from gathers
        for step in ready if gathers else ():
            yield from self._behind(step)

    def _behind(self, step: Action) -> Iterator[Action]:
        """Yield what follows a step, when its version is complete."""
        yield from self._followers.pop(step, ())
        if step.stage in self._ties:
            yield from self._await_gradients(step.stage, step.index + self._early(step.stage))
        if step.stage in self._lent:
            # Also versions of the cooldown that no forward uses: to know these would need a look ahead.
            yield Action(Op.SEND_W, step.stage, step.index + 1)


def lower(schedule: Schedule, norm: bool = False, sharded: bool = False, zero1: bool = False) -> Schedule:
    """Return the schedule with transfers, sums over replicas, tied exchanges and, with ``norm``, gradient norms; with
    ``sharded``, also the gathering of weights that are divided over lanes; with ``zero1``, of those that each replica
    of a stage has stepped."""
    lowered = add_transfers(schedule, norm, sharded, zero1)
    # A stream goes on beyond these programs, where nobody can look ahead, so its receives stay.
    return lowered if schedule.stream else post_in_time(lowered)


def add_transfers(schedule: Schedule, norm: bool = False, sharded: bool = False, zero1: bool = False) -> Schedule:
    """Return the same, with every receive right before the action that precedes its use."""
    setting = Setting(schedule.assignment, schedule.ties, normed=norm, sharded=sharded, zero1=zero1)
    return schedule.with_programs([
        list(Lowering(setting, rank, partial(iter, program), schedule.warmup).program())
        for rank, program in enumerate(schedule.programs)])


# -- the order of transfers ------------------------------------------------------------------------------

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


Standing = list[tuple[Action | None, int | None]]
"""Before which actions ranks stand, each with more of its state."""


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

    def standing(self) -> Standing:
        """Return before which action every rank stands, and in how long it goes on; None for one that is asleep."""
        goes_on = {rank: at - self._now for at, rank in self._awake}
        return [(action, goes_on.get(rank)) for rank, action in enumerate(self._next)]

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


def in_one_order(schedule: Schedule) -> tuple[Schedule, Mapping[int, Action]]:
    """Return a lowered schedule with its receives in the common order, and the ranks that cannot reach their end."""
    order = TransferOrder(schedule.setting, [iter(program) for program in schedule.programs], range(schedule.ranks))
    return schedule.with_programs([list(order.program(rank)) for rank in range(schedule.ranks)]), order.stuck
