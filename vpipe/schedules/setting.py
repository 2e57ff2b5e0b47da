"""The pipeline that a schedule is for, as far as the meaning of its actions depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vpipe.schedules.assignment import Assignment
from vpipe.schedules.size import Placement

TiedVersionOf = Callable[[int, int], int]
"""(owning stage, microbatch) -> version of its weights that the owner's forward uses; in a run, both counted within the
segment."""


def borrowing_ranks(placement: Placement, owner: int, borrowers: Iterable[int], rank: int) -> list[int]:
    """Return the ranks that get the tied weights of stage ``owner`` from ``rank``, one of its replicas.

    A rank that is one itself gets them from itself, a rank with replicas of several numbers from that of the lowest.
    """
    lenders = placement[owner]
    replica_of = dict(sorted(((borrower, replica) for stage in borrowers
                              for replica, borrower in enumerate(placement[stage])), reverse=True))  # the lowest
    return [borrower for replica, borrower in sorted((replica, borrower) for borrower, replica in replica_of.items())
            if rank == (borrower if borrower in lenders else lenders[Assignment.replica_of(replica, len(lenders))])]


@dataclass(frozen=True)
class Setting:
    """Answer what the rows of :mod:`vpipe.schedules.kinds` ask about the pipeline.

    Attributes:
        assignment: of microbatches to ranks and updates.
        ties: the stages that borrow a stage's tied weights, by owning stage.
        tied_version_of: the version of tied weights that a microbatch uses.
        is_lowered: there are transfers or sums. Without any, actions wait directly for those that make their inputs.
        normed: gradient norms are exchanged before the steps.
        sharded: the weights of stages are divided over lanes, and gathered for every update.
        zero1: each replica of a stage steps a part of its parameters, and sends it to the others.
    """

    assignment: Assignment
    ties: Mapping[int, Sequence[int]] = field(default_factory=dict)
    tied_version_of: TiedVersionOf = lambda owner, microbatch: 0
    is_lowered: bool = True
    normed: bool = False
    sharded: bool = False
    zero1: bool = False

    @property
    def placement(self) -> Placement:
        return self.assignment.placement

    @property
    def norms_of_all(self) -> bool:
        """Whether a step waits for the norms of all stages, not for those alone that the replicas of its own have."""
        return self.assignment.flush or not self.zero1

    def sums(self, stage: int) -> bool:
        """Return whether gradients of a stage are summed over replicas or lanes."""
        return self.sharded or (self.assignment.width(stage) > 1 and self.assignment.trains(stage))

    @cached_property
    def lent_by(self) -> Mapping[int, Sequence[int]]:
        """By borrowing stage, the stages that own the tied weights, in the order of ``ties``."""
        return {stage: [owner for owner in self.ties if stage in self.ties[owner]]
                for borrowers in self.ties.values() for stage in borrowers}

    @cached_property
    def borrowing(self) -> Mapping[int, Sequence[int]]:
        """By owning stage, the ranks with a stage that borrows its tied weights."""
        return {owner: sorted({rank for stage in filter(self._exists, borrowers) for rank in self.placement[stage]})
                for owner, borrowers in self.ties.items()}

    @cached_property
    def lending(self) -> Mapping[tuple[int, int], Sequence[int]]:
        """By owning stage and rank, the borrowing ranks that get the weights from that rank."""
        return {(owner, rank): borrowing_ranks(self.placement, owner, borrowers, rank)
                for owner, borrowers in self.ties.items() if all(map(self._exists, (owner, *borrowers)))
                for rank in self.placement[owner]}

    def lenders(self, owner: int, rank: int) -> list[int]:
        """Return the ranks of an owner from which ``rank`` gets tied weights."""
        return [lender for lender in self.placement[owner] if rank in self.lending.get((owner, lender), ())]

    def lent_gradients(self, owner: int, update: int, rank: int) -> Iterable[tuple[int, int]]:
        """Yield stage and microbatch of every gradient that ``rank`` makes for an update of the weights it borrows."""
        for stage in self.ties.get(owner, ()):
            if rank in self.placement[stage]:
                for microbatch in self.assignment.share(owner, update, stage, rank):
                    yield stage, microbatch

    def gradient_senders(self, owner: int, update: int) -> list[int]:
        """Return the ranks that send tied gradients of an update to the owner's ranks, in the order of their sends.

        A rank sends after its last backward of the update, later stages before earlier ones.
        """
        last: dict[int, tuple[int, int]] = {}
        for borrower in filter(self._exists, self.ties.get(owner, ())):
            for rank in self.placement[borrower]:
                if share := self.assignment.share(owner, update, borrower, rank):
                    last[rank] = max(last.get(rank, (-1, 0)), (share[-1], -borrower))
        return sorted(last, key=lambda rank: (last[rank], rank))

    def gradient_senders_before(self, owner: int, update: int, rank: int) -> list[int]:
        """Return the one of them that sends right before ``rank``; none before the first."""
        senders = self.gradient_senders(owner, update)
        at = senders.index(rank) if rank in senders else 0
        return senders[max(0, at - 1):at]

    def _exists(self, stage: int) -> bool:
        return 0 <= stage < len(self.placement)
