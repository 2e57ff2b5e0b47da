"""Lowering: from compute actions to what a rank really does.

Adds transfers between stages, the exchange of tied weights and the norms for global clipping. Works
lazily and on one rank at a time, so that a stream of unknown length can be lowered while it runs.

Receives stand before the compute action *preceding* the one that needs them: the transfer happens
behind that one. Where sends could wait for each other they stand earlier (:mod:`vpipe.schedules.receives`). Sends
stand right behind the action that made the tensors. Stages on the same rank pass tensors without a transfer.
A tied weight belongs to the first stage that uses it; other stages borrow it:

* the owner sends a version right behind the step that makes it; the borrower's forward of a microbatch
  uses the version that the owner's did;
* a rank sends the gradients of an update when its borrowing stages have all of them; the owner adds them
  to its own before the step;
* so a rank posts the receive of a version right behind the gradients that go into it. Later
  would deadlock without a flush when sends wait for their receives: the borrower comes to its next
  gradient before it needs the version, the owner sends the version before it takes that gradient.

These actions also stand where owner and borrower share a rank: then the tensors change hands there.
Norms of all stages of a rank are published before the first of them steps, since each step needs them all; and
an owner's step waits for the gradients of a borrower on the same rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from vpipe.schedules.action import COMPLETES, RETURNS, Action, Op
from vpipe.schedules.order import Schedule, stages_of_rank
from vpipe.schedules.receives import post_in_time
from vpipe.schedules.size import Placement

Compute = Callable[[int], Iterator[Action]]
"""The compute program of a rank, from its beginning, as often as asked."""


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
            self._used.pop(action.microbatch - _REMEMBERED, None)
        elif action.op is Op.STEP:
            self._steps += 1
        elif action.op is Op.USE:
            self._chosen = action.microbatch


class Lowering:
    """Lowers the program of one rank.

    Args:
        placement: ranks per stage.
        rank: whose program.
        compute: the compute programs, of this rank and of the owners of weights it borrows.
        update_every: microbatches per update.
        ties: borrowing stages by owning stage.
        norm: add the exchange of gradient norms before every step.
    """

    def __init__(self, placement: Placement, rank: int, compute: Compute, update_every: int,
                 ties: Mapping[int, Sequence[int]], norm: bool = False) -> None:
        self._placement, self._rank, self._compute = placement, rank, compute
        self._every, self._norm = update_every, norm
        self._stages = stages_of_rank(placement, rank)
        self._lent = [owner for owner, borrowers in ties.items() if owner in self._stages and borrowers]
        self._borrowers = {owner: here for owner, borrowers in ties.items()
                           if (here := set(borrowers) & set(self._stages))}
        self._completed: Counter[tuple[int, int]] = Counter()  # gradients there, by (borrowing stage, update)
        self._steps: list[Action] = []  # that wait for the rank's other stages
        self.versions = {owner: VersionsUsed(owner, compute(placement[owner][0])) for owner in self._borrowers}

    def program(self) -> Iterator[Action]:
        """The rank's actions, in order."""
        held: list[Action] = []
        for action in self._compute(self._rank):
            if action.op in RETURNS and Action(Op.FORWARD, action.stage, action.microbatch) in held:
                # The shapes of a gradient are known once its forward has run, not earlier.
                yield from self._release(held)
            yield from self._before(action)
            # What follows a step is received behind the compute before it, which is longer; R goes with its backward.
            if action.op not in (Op.STEP, Op.USE, Op.RECOMPUTE):
                yield from self._release(held)
            held.append(action)
        yield from self._release(held)

    def _release(self, held: list[Action]) -> Iterator[Action]:
        for action in held:
            yield from self._with_sends(action)
        held.clear()

    def _elsewhere(self, stage: int) -> bool:
        return 0 <= stage < len(self._placement) and self._rank not in self._placement[stage]

    def _before(self, action: Action) -> Iterator[Action]:
        """The receives that ``action`` needs."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            if self._elsewhere(stage - 1):
                yield Action(Op.RECV_F, stage, index)
        elif op in RETURNS and self._elsewhere(stage + 1):
            yield Action(Op.RECV_B, stage, index)
        elif op is Op.STEP and stage in self._lent:
            yield Action(Op.RECV_G, stage, index)

    def _with_sends(self, action: Action) -> Iterator[Action]:
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.STEP:
            self._steps.append(action)
            yield from self._take_steps()
            return
        yield action
        if op is Op.FORWARD and self._elsewhere(stage + 1):
            yield Action(Op.SEND_F, stage, index)
        if op in RETURNS and self._elsewhere(stage - 1):
            yield Action(Op.SEND_B, stage, index)
        if op in COMPLETES:
            yield from self._tied_gradients(stage, index // self._every)

    def _tied_gradients(self, stage: int, update: int) -> Iterator[Action]:
        """The gradients of weights borrowed here, once the last of the rank's stages has those of an update."""
        owners = [owner for owner, borrowers in self._borrowers.items() if stage in borrowers]
        if not owners:
            return
        self._completed[stage, update] += 1
        for owner in owners:
            if all(self._completed[borrower, update] == self._every for borrower in self._borrowers[owner]):
                yield Action(Op.SEND_G, owner, update)
                yield Action(Op.RECV_W, owner, update + 1)
        yield from self._take_steps()
        self._completed.pop((stage, update - _REMEMBERED), None)

    def _may_step(self, step: Action) -> bool:
        """Whether the stages of this rank that borrow from the one stepping have their gradients."""
        return all(self._completed[borrower, step.microbatch] == self._every
                   for borrower in self._borrowers.get(step.stage, ()))

    def _take_steps(self) -> Iterator[Action]:
        """The steps that need not wait any longer, each with its version for those that borrow it."""
        ready = [step for step in self._steps if self._may_step(step)]
        if self._norm:
            if len(ready) < len(self._stages):
                return
            yield from (Action(Op.NORM, step.stage, step.microbatch) for step in ready)
        for step in ready:
            self._steps.remove(step)
            yield step
            if step.stage in self._lent:
                # Also those of the cooldown that no forward uses: to know them would need a look ahead.
                yield Action(Op.SEND_W, step.stage, step.microbatch + 1)


def lower(schedule: Schedule, norm: bool = False) -> Schedule:
    """The schedule with transfers, tied exchanges and, when ``norm``, gradient norms added."""

    def compute(rank: int) -> Iterator[Action]:
        return iter(schedule.programs[rank])

    lowered = schedule.with_programs([
        list(Lowering(schedule.placement, rank, compute, schedule.update_every, schedule.ties, norm).program())
        for rank in range(len(schedule.programs))])
    # A stream goes on beyond these programs, where nobody can look ahead: it must do without.
    return post_in_time(lowered) if schedule.recipe is None else lowered
