"""Lower compute actions to the actions that a rank executes.

Lowering adds the transfers between stages, the sums over replicas, the exchange of tied weights and the norms for
global clipping. It works lazily and on one rank at a time, so that a stream of unknown length can be lowered while it
runs.

A receive is posted before the compute action *preceding* the one that needs it, so that the transfer happens during
that action. Where sends could wait for each other, receives are posted earlier (:mod:`vpipe.schedules.transfer_order`).
A send stands right behind the action that made the tensors. Stages on the same rank pass tensors without a transfer.

A tied weight belongs to the first stage that uses it; other stages borrow it:

* The owner sends a version right behind the step that makes it. The borrower's forward of a microbatch uses the version
  that the owner's forward used. With replicas, every borrowing rank gets it from one of the owner's ranks.
* A rank sends the gradients of an update when its borrowing stages have all of them, to all of the owner's replicas.
  These add them to their own before the step.
* Without a flush the owner posts their receives as soon as it has made the update before, or one before that.
* A rank posts the receive of a version right behind the gradients that go into it. Later would deadlock without a flush
  when sends wait for their receives: the borrower comes to its next gradient before it needs the version, and the owner
  sends the version before it takes that gradient.

These actions also stand where owner and borrower share a rank; there the tensors change hands. The norms of all stages
of a rank are published before the first of them steps, since each step needs them all. An owner's step waits for the
gradients of a borrower on the same rank.

The replicas of a stage send each other the gradients of an update behind its last backward or weight half. Before the
step each sums its share of them (REDUCE_GRAD) and sends the sum to the others; the step waits for theirs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from vpipe.schedules.action import COMPLETES, COMPUTE, RETURNS, Action, Op
from vpipe.schedules.dependencies import borrowing_ranks
from vpipe.schedules.schedule import Rounds, Schedule, stages_of_rank
from vpipe.schedules.size import default_warmup
from vpipe.schedules.transfer_order import post_in_time

Compute = Callable[[int], Iterator[Action]]
"""Returns the compute program of a rank, from its beginning."""

_FORWARD, _STEP, _SEND_F, _SEND_B, _RECV_F, _RECV_B = (
    Op.FORWARD, Op.STEP, Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B)
"""To name a member of an enumeration takes longer than to compare with it, and a stream is lowered while it runs."""

_LONG = COMPUTE - {Op.RECOMPUTE}
"""Operations that take long enough to transfer something meanwhile."""

_REMEMBERED = 4096
"""Microbatches whose versions are remembered: far more than are ever in flight."""


class VersionsUsed:
    """Read off the program of an owner's rank which version of its weights each microbatch uses; 0 is its first."""

    def __init__(self, owner: int, program: Iterator[Action]) -> None:
        self._owner, self._program = owner, program
        self._used: dict[int, int] = {}
        self._steps = 0
        self._chosen: int | None = None

    def of(self, microbatch: int) -> int:
        """Return the version that the owner's forward uses."""
        while microbatch not in self._used:
            action = next(self._program)
            if action.stage != self._owner:
                continue
            if action.op is Op.FORWARD:
                self._used[action.microbatch] = self._steps if self._chosen is None else self._chosen
                if len(self._used) > _REMEMBERED:
                    del self._used[next(iter(self._used))]
            elif action.op is Op.STEP:
                self._steps += 1
            elif action.op is Op.USE:
                self._chosen = action.microbatch
        return self._used[microbatch]


class Lowering:
    """Lower the program of one rank.

    Args:
        compute: the compute programs, of this rank and of the owners of weights that it borrows.
        ties: borrowing stages by owning stage.
        norm: add the exchange of gradient norms before every step.
        warmup: forwards of a replica of every stage before its first backward, where it is a stream.
    """

    def __init__(self, rounds: Rounds, rank: int, compute: Compute, ties: Mapping[int, Sequence[int]],
                 norm: bool = False, warmup: Sequence[int] = ()) -> None:
        self._rounds, self._rank, self._compute, self._norm = rounds, rank, compute, norm
        self._warmup = warmup
        placement = rounds.placement
        self._stages = stages_of_rank(placement, rank)
        self._ties = {owner: borrowers for owner, borrowers in ties.items() if owner in self._stages and borrowers}
        self._lent = {owner for owner, borrowers in self._ties.items()
                      if borrowing_ranks(placement, owner, borrowers, rank)}
        self._borrowers = {owner: sorted(here) for owner, borrowers in ties.items()
                           if (here := set(borrowers) & set(self._stages))}
        self._completed: Counter[tuple[int, int, int]] = Counter()  # gradients there, by (owner, update, borrower)
        self._closed = dict.fromkeys(self._borrowers, 0)  # updates of the owner that got all of this rank's gradients
        # Where a step waits for other replicas, other ranks must be able to send past it.
        self._ahead = 2 if not rounds.flush and any(rounds.width(stage) > 1 for stage in self._stages) else 1
        # Receives of activations that are posted earlier still, and the forwards that they are for.
        self._early_receives = self._surplus() if warmup else 0
        self._forwards = (action for action in compute(rank) if action.op is Op.FORWARD)
        self._forwards_met = self._receives_met = 0
        self._steps: list[Action] = []  # that wait for the rank's other stages
        self._steps_alone = not (norm or self._borrowers or self._ties
                                 or any(rounds.width(stage) > 1 for stage in self._stages))
        self._versions = {(owner, replica): VersionsUsed(owner, compute(rank)) for owner in self._borrowers
                          for replica, rank in enumerate(placement[owner])}

    def version_of(self, owner: int, microbatch: int) -> int:
        """Return the version of a borrowed weight that a microbatch uses."""
        return self._versions[owner, microbatch % self._rounds.width(owner)].of(microbatch)

    def program(self) -> Iterator[Action]:
        """Yield the rank's actions, in order."""
        delayed: deque[Action] = deque()
        for owner in self._borrowers:
            yield from self._close(owner)
        for owner in self._ties:
            for update in range(self._early(owner)):
                yield from self._await_gradients(owner, update)
        for action in self._compute(self._rank):
            if action.op in RETURNS:
                # The shapes of a gradient are known once its forward has run, not earlier.
                while any(one.microbatch == action.microbatch and one.stage == action.stage and one.op is _FORWARD
                          for one in delayed):
                    yield from self._with_sends(delayed.popleft())
            yield from self._before(action)
            # Inputs of the action behind a step arrive during the compute before it, which is longer; so with an R.
            if action.op in _LONG:
                while delayed and (self._ahead == 1 or delayed[0].op not in _LONG
                                   or sum(one.op in _LONG for one in delayed) >= self._ahead):
                    yield from self._with_sends(delayed.popleft())
            delayed.append(action)
        while delayed:
            yield from self._with_sends(delayed.popleft())
        for owner in self._borrowers:
            yield from self._close(owner, ended=True)
        yield from self._take_steps()

    def _surplus(self) -> int:
        """Return how many more microbatches than in 1F1B the previous stage sends before it waits for a gradient."""
        widths = list(map(len, self._rounds.placement))
        more = [depth - least for depth, least in zip(self._warmup, default_warmup(widths), strict=True)]
        return max((-(-more[stage - 1] * widths[stage - 1] // widths[stage]) - more[stage] for stage in self._stages
                    if stage), default=0)

    def _elsewhere(self, stage: int, microbatch: int) -> bool:
        placement = self._rounds.placement
        if not 0 <= stage < len(placement):
            return False
        ranks = placement[stage]
        return ranks[microbatch % len(ranks)] != self._rank

    def _before(self, action: Action) -> tuple[Action, ...]:
        """Return the receives that ``action`` needs."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is _FORWARD and self._early_receives:
            return tuple(self._receive_early())
        if op is _FORWARD:
            return (Action(_RECV_F, stage, index),) if self._elsewhere(stage - 1, index) else ()
        if op in RETURNS:
            return (Action(_RECV_B, stage, index),) if self._elsewhere(stage + 1, index) else ()
        return (Action(Op.RECV_G, stage, index),) if op is _STEP and stage in self._ties and self._rounds.flush else ()

    def _receive_early(self) -> Iterator[Action]:
        """Yield the receives of the activations for the next forward and the ones behind it, so far as none is yet."""
        self._forwards_met += 1
        for forward in islice(self._forwards, self._forwards_met + self._early_receives - self._receives_met):
            self._receives_met += 1
            if self._elsewhere(forward.stage - 1, forward.microbatch):
                yield Action(_RECV_F, forward.stage, forward.microbatch)

    def _with_sends(self, action: Action) -> Iterable[Action]:
        """Return an action, when it may be executed, and what is sent behind it."""
        op, stage, index = action.op, action.stage, action.microbatch
        if op is _STEP:
            if self._steps_alone:
                return (action,)
            self._steps.append(action)
            return self._take_steps()
        actions = [action]
        if op is _FORWARD:
            if self._elsewhere(stage + 1, index):
                actions.append(Action(_SEND_F, stage, index))
        elif op in RETURNS and self._elsewhere(stage - 1, index):
            actions.append(Action(_SEND_B, stage, index))
        if self._borrowers and op in COMPLETES:
            return chain(actions, self._complete(action))
        return actions

    def _complete(self, action: Action) -> Iterator[Action]:
        """Note the gradients of a microbatch for the weights that its stage borrows."""
        owners = [owner for owner, here in self._borrowers.items() if action.stage in here]
        for owner in owners:
            self._completed[owner, action.microbatch // self._rounds.per_update(owner), action.stage] += 1
            yield from self._close(owner)
        if owners:
            yield from self._take_steps()

    def _close(self, owner: int, ended: bool = False) -> Iterator[Action]:
        """Send the gradients of the owner's next updates that are complete, and post receives for the new versions.

        An update that takes no microbatch of this rank waits for nothing from it.
        """
        while (self._has_gradients(owner, update := self._closed[owner], ended)
               and self._rounds.has_update(owner, update)):
            for borrower in self._borrowers[owner]:
                self._completed.pop((owner, update, borrower), None)
            self._closed[owner] += 1
            if self._rounds.share(owner, update, self._borrowers[owner][0], self._rank):
                yield Action(Op.SEND_G, owner, update)
            yield Action(Op.RECV_W, owner, update + 1)

    def _early(self, owner: int) -> int:
        """Return for how many updates the owner posts receives of gradients ahead.

        Where a replica waits for others, a rank that sends to it may be as many updates ahead as the replica has
        microbatches in flight. Otherwise that rank would wait for the replica while the replica waits for it.
        """
        if all(len(ranks) == 1 for ranks in self._rounds.placement):
            return 1
        depths = self._warmup or default_warmup(list(map(len, self._rounds.placement)))
        return depths[owner] // self._rounds.update_every + 1

    def _await_gradients(self, owner: int, update: int) -> Iterator[Action]:
        """Post, without a flush, the receive of the borrowers' gradients of an update before they can send them."""
        if not self._rounds.flush and self._rounds.has_update(owner, update):
            yield Action(Op.RECV_G, owner, update)

    def _has_gradients(self, owner: int, update: int, ended: bool) -> bool:
        for borrower in self._borrowers[owner]:
            done = self._completed[owner, update, borrower]
            if not (done or ended) and self._rounds.complete_share(owner, update, borrower, self._rank):
                return False  # to ask whether more microbatches exist would read the data too early
            if done != len(self._rounds.share(owner, update, borrower, self._rank)):
                return False
        return True

    def _take_steps(self) -> Iterator[Action]:
        """Yield the steps that need not wait any longer, each with its version for the borrowers.

        A step waits for the gradients of the stages of this rank that borrow its weights.
        """
        ready = [step for step in self._steps if step.microbatch < self._closed.get(step.stage, step.microbatch + 1)]
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
                # Also versions of the cooldown that no forward uses: to know these would need a look ahead.
                yield Action(Op.SEND_W, step.stage, step.microbatch + 1)


def lower(schedule: Schedule, norm: bool = False) -> Schedule:
    """Return the schedule with transfers, sums over replicas, tied exchanges and, with ``norm``, gradient norms."""
    lowered = add_transfers(schedule, norm)
    # A stream goes on beyond these programs, where nobody can look ahead, so its receives stay.
    return lowered if schedule.stream else post_in_time(lowered)


def add_transfers(schedule: Schedule, norm: bool = False) -> Schedule:
    """Return the same, with every receive right before the action that precedes its use."""
    def compute(rank: int) -> Iterator[Action]:
        return iter(schedule.programs[rank])

    return schedule.with_programs([
        list(Lowering(schedule.rounds, rank, compute, schedule.ties, norm, schedule.warmup).program())
        for rank in range(schedule.ranks)])
