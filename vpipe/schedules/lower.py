"""Lowering: from compute actions to what a rank really does.

Adds transfers between stages, the sums over replicas, the exchange of tied weights and the norms for global clipping.
Works lazily and on one rank at a time, so that a stream of unknown length can be lowered while it runs.

Receives stand before the compute action *preceding* the one that needs them: the transfer happens
behind that one. Where sends could wait for each other they stand earlier (:mod:`vpipe.schedules.receive_order`). Sends
stand right behind the action that made the tensors. Stages on the same rank pass tensors without a transfer.
A tied weight belongs to the first stage that uses it; other stages borrow it:

* the owner sends a version right behind the step that makes it; the borrower's forward of a microbatch
  uses the version that the owner's did. With replicas, every rank that borrows gets it from one of the owner's;
* a rank sends the gradients of an update when its borrowing stages have all of them, to all of the owner's replicas;
  these add them to their own before the step;
* without a flush the owner gets ready for them as soon as it has made the update before, or one before that;
* a rank posts the receive of a version right behind the gradients that go into it. Later
  would deadlock without a flush when sends wait for their receives: the borrower comes to its next
  gradient before it needs the version, the owner sends the version before it takes that gradient.

These actions also stand where owner and borrower share a rank: then the tensors change hands there.
Norms of all stages of a rank are published before the first of them steps, since each step needs them all; and
an owner's step waits for the gradients of a borrower on the same rank.

The replicas of a stage send each other the gradients of an update behind its last backward or weight half. Before the
step each sums its share of them (REDUCE_GRAD) and sends that to the others; the step waits for theirs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from vpipe.schedules.action import COMPLETES, COMPUTE, RETURNS, Action, Op
from vpipe.schedules.dependencies import borrowing_ranks
from vpipe.schedules.receive_order import post_in_time
from vpipe.schedules.replication import Rounds
from vpipe.schedules.schedule import Schedule, stages_of_rank

Compute = Callable[[int], Iterator[Action]]
"""The compute program of a rank, from its beginning, as often as asked."""


_LONG = COMPUTE - {Op.RECOMPUTE}
"""What takes long enough to transfer something meanwhile."""

_REMEMBERED = 4096
"""Microbatches after which nobody asks for a version any more: far more than are ever in flight."""


class VersionsUsed:
    """Which version of an owner's weights each microbatch uses, read off the program of the owner's rank."""

    def __init__(self, owner: int, program: Iterator[Action]) -> None:
        self._owner, self._program = owner, program
        self._used: dict[int, int] = {}
        self._steps = 0
        self._chosen: int | None = None

    def of(self, microbatch: int) -> int:
        """The version (0 = the first of this program) that the owner's forward uses."""
        while microbatch not in self._used:
            self._advance(next(self._program))
        return self._used[microbatch]

    def _advance(self, action: Action) -> None:
        if action.stage != self._owner:
            return
        if action.op is Op.FORWARD:
            self._used[action.microbatch] = self._steps if self._chosen is None else self._chosen
            if len(self._used) > _REMEMBERED:
                del self._used[next(iter(self._used))]
        elif action.op is Op.STEP:
            self._steps += 1
        elif action.op is Op.USE:
            self._chosen = action.microbatch


class Lowering:
    """Lowers the program of one rank.

    Args:
        rounds: who takes which microbatch, and which update does.
        rank: whose program.
        compute: the compute programs, of this rank and of the owners of weights it borrows.
        ties: borrowing stages by owning stage.
        norm: add the exchange of gradient norms before every step.
    """

    def __init__(self, rounds: Rounds, rank: int, compute: Compute, ties: Mapping[int, Sequence[int]],
                 norm: bool = False) -> None:
        self._rounds, self._rank, self._compute, self._norm = rounds, rank, compute, norm
        placement = rounds.placement
        self._stages = stages_of_rank(placement, rank)
        self._ties = {owner: borrowers for owner, borrowers in ties.items() if owner in self._stages and borrowers}
        self._lent = {owner for owner, borrowers in self._ties.items()
                      if borrowing_ranks(placement, owner, borrowers, rank)}
        self._borrowers = {owner: sorted(here) for owner, borrowers in ties.items()
                           if (here := set(borrowers) & set(self._stages))}
        self._completed: Counter[tuple[int, int, int]] = Counter()  # gradients there, by (owner, update, borrower)
        self._closed = dict.fromkeys(self._borrowers, 0)  # updates of the owner that got all of this rank's gradients
        # Where a step waits for other replicas, others must be able to send past it.
        self._ahead = 2 if not rounds.flush and any(rounds.width(stage) > 1 for stage in self._stages) else 1
        self._steps: list[Action] = []  # that wait for the rank's other stages
        self._versions = {(owner, replica): VersionsUsed(owner, compute(rank)) for owner in self._borrowers
                          for replica, rank in enumerate(placement[owner])}

    def version_of(self, owner: int, microbatch: int) -> int:
        """The version (0 = the first of this program) of a borrowed weight that a microbatch uses."""
        return self._versions[owner, microbatch % self._rounds.width(owner)].of(microbatch)

    def program(self) -> Iterator[Action]:
        """The rank's actions, in order."""
        held: deque[Action] = deque()
        for owner in self._borrowers:
            yield from self._close(owner)
        for owner in self._ties:
            for update in range(self._early(owner)):
                yield from self._await_gradients(owner, update)
        for action in self._compute(self._rank):
            if action.op in RETURNS:
                # The shapes of a gradient are known once its forward has run, not earlier.
                while Action(Op.FORWARD, action.stage, action.microbatch) in held:
                    yield from self._with_sends(held.popleft())
            yield from self._before(action)
            # What follows a step is received behind the compute before it, which is longer; R goes with its backward.
            if action.op not in (Op.STEP, Op.USE, Op.RECOMPUTE):
                while held and (self._ahead == 1 or held[0].op not in _LONG
                                or sum(one.op in _LONG for one in held) >= self._ahead):
                    yield from self._with_sends(held.popleft())
            held.append(action)
        while held:
            yield from self._with_sends(held.popleft())
        for owner in self._borrowers:
            yield from self._close(owner, ended=True)
        yield from self._take_steps()

    def _elsewhere(self, stage: int, microbatch: int) -> bool:
        return (0 <= stage < len(self._rounds.placement)
                and self._rounds.rank_of(stage, microbatch) != self._rank)

    def _before(self, action: Action) -> Iterator[Action]:
        """The receives that ``action`` needs."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            if self._elsewhere(stage - 1, index):
                yield Action(Op.RECV_F, stage, index)
        elif op in RETURNS and self._elsewhere(stage + 1, index):
            yield Action(Op.RECV_B, stage, index)
        elif op is Op.STEP and stage in self._ties and self._rounds.flush:
            yield Action(Op.RECV_G, stage, index)

    def _with_sends(self, action: Action) -> Iterator[Action]:
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.STEP:
            self._steps.append(action)
            yield from self._take_steps()
            return
        yield action
        if op is Op.FORWARD and self._elsewhere(stage + 1, index):
            yield Action(Op.SEND_F, stage, index)
        if op in RETURNS and self._elsewhere(stage - 1, index):
            yield Action(Op.SEND_B, stage, index)
        if op in COMPLETES:
            yield from self._tied_gradients(stage, index)

    def _tied_gradients(self, stage: int, microbatch: int) -> Iterator[Action]:
        """The gradients of weights borrowed here, once the last of the rank's stages has those of an update."""
        owners = [owner for owner, borrowers in self._borrowers.items() if stage in borrowers]
        for owner in owners:
            self._completed[owner, microbatch // self._rounds.span(owner), stage] += 1
            yield from self._close(owner)
        if owners:
            yield from self._take_steps()

    def _close(self, owner: int, ended: bool = False) -> Iterator[Action]:
        """Send the gradients of the owner's next updates that are there, and get ready for what they make.

        An update that takes no microbatch of this rank's waits for nothing from it.
        """
        while (self._has_gradients(owner, update := self._closed[owner], ended)
               and self._rounds.begins(owner, update)):
            for borrower in self._borrowers[owner]:
                self._completed.pop((owner, update, borrower), None)
            self._closed[owner] += 1
            if self._rounds.share(owner, update, self._borrowers[owner][0], self._rank):
                yield Action(Op.SEND_G, owner, update)
            yield Action(Op.RECV_W, owner, update + 1)

    def _early(self, owner: int) -> int:
        """For how many updates the owner awaits gradients at once.

        Where a replica waits for others, those that send to it may be as many updates ahead as it has microbatches
        under way; they would wait for it while it waits for them.
        """
        placement = self._rounds.placement
        if all(len(ranks) == 1 for ranks in placement):
            return 1
        depth = (sum(map(len, dict.fromkeys(placement[owner:]))) - 1) // self._rounds.width(owner)
        return depth // self._rounds.update_every + 1

    def _await_gradients(self, owner: int, update: int) -> Iterator[Action]:
        """Without a flush: get ready for what borrowers send for an update, before they can send it."""
        if not self._rounds.flush and self._rounds.begins(owner, update):
            yield Action(Op.RECV_G, owner, update)

    def _has_gradients(self, owner: int, update: int, ended: bool) -> bool:
        for borrower in self._borrowers[owner]:
            done = self._completed[owner, update, borrower]
            if not (done or ended) and self._rounds.whole_share(owner, update, borrower, self._rank):
                return False  # whether there are any is not asked before it must be: that reads the data
            if done != len(self._rounds.share(owner, update, borrower, self._rank)):
                return False
        return True

    def _may_step(self, step: Action) -> bool:
        """Whether the stages of this rank that borrow from the one stepping have their gradients."""
        return step.microbatch < self._closed.get(step.stage, step.microbatch + 1)

    def _take_steps(self) -> Iterator[Action]:
        """The steps that need not wait any longer, each with its version for those that borrow it."""
        ready = [step for step in self._steps if self._may_step(step)]
        if self._norm and len(ready) < len(self._stages):
            return
        yield from (Action(Op.REDUCE, step.stage, step.microbatch) for step in ready
                    if self._rounds.width(step.stage) > 1)
        if self._norm:
            yield from (Action(Op.NORM, step.stage, step.microbatch) for step in ready)
        for step in ready:
            self._steps.remove(step)
            yield step
            if step.stage in self._ties:
                yield from self._await_gradients(step.stage, step.microbatch + self._early(step.stage))
            if step.stage in self._lent:
                # Also those of the cooldown that no forward uses: to know them would need a look ahead.
                yield Action(Op.SEND_W, step.stage, step.microbatch + 1)


def lower(schedule: Schedule, norm: bool = False) -> Schedule:
    """The schedule with transfers, sums over replicas, tied exchanges and, when ``norm``, gradient norms added."""

    def compute(rank: int) -> Iterator[Action]:
        return iter(schedule.programs[rank])

    lowered = schedule.with_programs([
        list(Lowering(schedule.rounds, rank, compute, schedule.ties, norm).program())
        for rank in range(len(schedule.programs))])
    # A stream goes on beyond these programs, where nobody can look ahead: it must do without.
    return post_in_time(lowered) if not schedule.stream else lowered
