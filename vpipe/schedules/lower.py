"""Lowering: from compute actions to what a rank really does.

Adds transfers between stages, the exchange of tied weights and the norms for global clipping. Works
lazily and on one rank at a time, so that a stream of unknown length can be lowered while it runs.

Receives stand before the compute action *preceding* the one that needs them: the transfer happens
behind that one. Sends stand right behind the action that made the tensors. A tied weight belongs to
the first stage that uses it; other ranks borrow it:

* the owner sends a version right behind the step that makes it; the borrower's forward of a microbatch
  uses the version that the owner's did;
* the borrower sends the gradient of an update when its backwards of that update are done; the owner
  adds it to its own before the step;
* so the borrower posts the receive of a version right behind the gradient that goes into it. Later
  would deadlock without a flush when sends wait for their receives: the borrower comes to its next
  gradient before it needs the version, the owner sends the version before it takes that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from vpipe.schedules.action import Action, Op
from vpipe.schedules.order import Placement, Schedule

Compute = Callable[[int], Iterator[Action]]
"""The compute program of a rank, from its beginning, as often as asked."""


_REMEMBERED = 4096
"""Microbatches after which nobody asks for a version any more: far more than are ever in flight."""


class VersionsUsed:
    """Which version of an owner's weights each microbatch uses, read off the owner's program."""

    def __init__(self, owner: int, program: Iterator[Action]) -> None:
        self._owner, self._program = owner, program
        self._used: dict[int, int] = {}
        self.steps = 0

    def of(self, microbatch: int) -> int:
        """The version (0 = the first of this program) that the owner's forward uses."""
        while microbatch not in self._used:
            self._advance(next(self._program))
        return self._used[microbatch]

    def _advance(self, action: Action) -> None:
        if action.stage == self._owner and action.op is Op.FORWARD:
            self._used[action.microbatch] = self.steps
            self._used.pop(action.microbatch - _REMEMBERED, None)
        elif action.stage == self._owner and action.op is Op.STEP:
            self.steps += 1


class Lowering:
    """Lowers the program of one rank.

    Args:
        placement: ranks per stage.
        rank: whose program.
        compute: the compute programs, of this rank and of the owners of weights it borrows.
        update_every: microbatches per update.
        ties: borrowing ranks by owning stage.
        norm: add the exchange of gradient norms before every step.
    """

    def __init__(self, placement: Placement, rank: int, compute: Compute, update_every: int,
                 ties: Mapping[int, Sequence[int]], norm: bool = False) -> None:
        self._placement, self._rank, self._compute = placement, rank, compute
        self._every, self._norm = update_every, norm
        self._lent = [owner for owner, borrowers in ties.items() if rank in placement[owner] and borrowers]
        self._borrowed = [owner for owner, borrowers in ties.items() if rank in borrowers]
        self.versions = {owner: VersionsUsed(owner, compute(placement[owner][0])) for owner in self._borrowed}

    def program(self) -> Iterator[Action]:
        """The rank's actions, in order."""
        held: list[Action] = []
        for action in self._compute(self._rank):
            if action.op is Op.BACKWARD and Action(Op.FORWARD, action.stage, action.microbatch) in held:
                # The shapes of a gradient are known once its forward has run, not earlier.
                for waiting in held:
                    yield from self._with_sends(waiting)
                held.clear()
            yield from self._before(action)
            if action.op is not Op.STEP:  # a step is short: what follows it is received behind the compute before it
                for waiting in held:
                    yield from self._with_sends(waiting)
                held.clear()
            held.append(action)
        for waiting in held:
            yield from self._with_sends(waiting)

    def _elsewhere(self, stage: int) -> bool:
        return 0 <= stage < len(self._placement) and self._rank not in self._placement[stage]

    def _before(self, action: Action) -> Iterator[Action]:
        """The receives that ``action`` needs."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.FORWARD:
            if self._elsewhere(stage - 1):
                yield Action(Op.RECV_F, stage, index)
        elif op is Op.BACKWARD and self._elsewhere(stage + 1):
            yield Action(Op.RECV_B, stage, index)
        elif op is Op.STEP and stage in self._lent:
            yield Action(Op.RECV_G, stage, index)

    def _with_sends(self, action: Action) -> Iterator[Action]:
        op, stage, index = action.op, action.stage, action.microbatch
        if op is Op.STEP and self._norm:
            yield Action(Op.NORM, stage, index)
        yield action
        if op is Op.FORWARD and self._elsewhere(stage + 1):
            yield Action(Op.SEND_F, stage, index)
        elif op is Op.BACKWARD:
            if self._elsewhere(stage - 1):
                yield Action(Op.SEND_B, stage, index)
            if (index + 1) % self._every == 0:
                for owner in self._borrowed:
                    yield Action(Op.SEND_G, owner, index // self._every)
                    yield Action(Op.RECV_W, owner, index // self._every + 1)
        elif op is Op.STEP and stage in self._lent:
            # Also those of the cooldown that no forward uses: to know them would need a look ahead.
            yield Action(Op.SEND_W, stage, index + 1)


def lower(schedule: Schedule, norm: bool = False) -> Schedule:
    """The schedule with transfers, tied exchanges and, when ``norm``, gradient norms added."""

    def compute(rank: int) -> Iterator[Action]:
        return iter(schedule.programs[rank])

    return schedule.with_programs([
        list(Lowering(schedule.placement, rank, compute, schedule.update_every, schedule.ties, norm).program())
        for rank in range(len(schedule.programs))])
