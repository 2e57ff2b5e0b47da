"""The pipeline that a schedule is for: its size, the placement of its stages, the assignment of microbatches.

With a flush an update takes all microbatches. Without one it takes ``update_every`` on every replica of its stage. The
last update of a stream takes the microbatches that are left; a replica may have none of it.

Where microbatches are cut into slices of their sequences, an action is of a slice: its index is ``microbatch * slices +
slice``, and whatever counts microbatches here counts slices. Those of a microbatch stay on one replica.

Source: Narayanan et al., PipeDream (SOSP 2019), section 3.2, 1F1B with round-robin over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import lcm

from vpipe.description.cut import Placement as Placement

PlacementRule = Callable[[int, int], Placement]
"""``rule(ranks, chunks)``: the ranks of each of the ``ranks * chunks`` stages of a pipeline. :class:`Layout` and
:func:`both_ways` are some; any function may be another."""


@dataclass(frozen=True)
class Size:
    """The numbers that a schedule is made for; for a replica, those of its own pipeline.

    Attributes:
        ranks: p, how many work at once.
        microbatches: m, per optimizer step with a flush, of the whole stream without.
        chunks: v, stages per rank that a microbatch passes.
        update_every: microbatches per optimizer step.
        even: all stages have equally many replicas.
        warmup: by rank, its forwards before its first backward; those of 1F1B where it is empty.
        slices: n, of every microbatch.
    """

    ranks: int
    microbatches: int
    chunks: int
    update_every: int
    even: bool = True
    warmup: tuple[int, ...] = ()
    slices: int = 1

    def warmup_of(self, rank: int) -> int:
        """Return the forwards of a rank before its first backward."""
        return self.warmup[rank] if self.warmup else self.ranks - 1 - rank

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


class Layout(StrEnum):
    """The placements of stages that have one rank each; a member is a :data:`PlacementRule`."""

    LOOP = "loop"  # 0 1 2 3, 0 1 2 3: stage s on rank s mod p
    ZIGZAG = "zigzag"  # 0 1 2 3, 3 2 1 0: every second time in reverse, so that neighbours at a turn share a rank

    def rank_of(self, stage: int, ranks: int) -> int:
        """Return the rank that holds ``stage``."""
        chunk, rank = divmod(stage, ranks)
        return ranks - 1 - rank if self is Layout.ZIGZAG and chunk % 2 else rank

    def stage_of(self, rank: int, chunk: int, ranks: int) -> int:
        """Return the stage that ``rank`` holds as its ``chunk``-th, in the order in which a microbatch visits them."""
        return chunk * ranks + self.rank_of(chunk * ranks + rank, ranks)

    def __call__(self, ranks: int, chunks: int = 1) -> Placement:
        """Return the rank of every stage."""
        return tuple((self.rank_of(stage, ranks),) for stage in range(ranks * chunks))


def both_ways(ranks: int, chunks: int = 1) -> Placement:
    """Place two copies of every stage, so that even microbatches go down the ranks and odd ones up: on rank r mod p
    and on its opposite, p-1-r. With an odd number of ranks the one in the middle is its own opposite."""
    return tuple((rank, ranks - 1 - rank) if 2 * rank != ranks - 1 else (rank,)
                 for (rank,) in Layout.LOOP(ranks, chunks))


def widened(placement: Placement, replicas: int) -> Placement:
    """Replace every rank by so many consecutive ranks: with two replicas, rank r becomes ranks 2r and 2r + 1.

    Consecutive ranks are likely on one host, where the sums of gradients over replicas cost least. Where a stage has
    several ranks already, its replicas stand in their order: ranks 0 and 3 become 0, 1, 6 and 7. So every microbatch
    stays in one of the pipelines, which take turns.
    """
    return tuple(tuple(rank * replicas + replica for rank in ranks for replica in range(replicas))
                 for ranks in placement)


def default_warmup(widths: Sequence[int]) -> tuple[int, ...]:
    """Return, per stage, how many forwards of a replica precede its first backward in 1F1B.

    A replica of a stage with w of the R ranks of its own and later stages takes (R - 1) // w microbatches before its
    first one comes back. ``widths`` are the replicas of every stage.
    """
    return tuple((sum(widths[stage:]) - 1) // width for stage, width in enumerate(widths))


@dataclass(frozen=True)
class Assignment:
    """Say which rank takes which microbatch through which stage, and which update its gradient goes into.

    Nothing else knows that the replicas of a stage take turns: another assignment is another class with these methods.

    Attributes:
        placement: ranks per stage.
        update_every: microbatches per update with a flush; per update and replica without.
        flush: the pipeline is empty at every update.
        has_microbatch: tells whether there is a microbatch of a number. If so, all smaller numbers exist.
        frozen: how many stages from the first on train nothing, so that no gradient is made there.
        slices: of every microbatch.
    """

    placement: Placement
    update_every: int
    flush: bool
    has_microbatch: Callable[[int], bool]
    frozen: int = 0
    slices: int = 1

    def trains(self, stage: int) -> bool:
        """Return whether gradients of a stage are made; of none outside the pipeline."""
        return stage >= self.frozen

    @staticmethod
    def replica_of(microbatch: int, width: int) -> int:
        """Return the replica, of ``width``, that takes a microbatch."""
        return microbatch % width

    @staticmethod
    def microbatch_of(turn: int, replica: int, width: int) -> int:
        """Return the microbatch that a replica takes in a turn, both from 0."""
        return turn * width + replica

    @classmethod
    def turns_of(cls, microbatches: int, replica: int, width: int) -> int:
        """Return how many of the first ``microbatches`` a replica takes."""
        return len(range(cls.microbatch_of(0, replica, width), microbatches, width))

    def width(self, stage: int) -> int:
        """Return the number of replicas of a stage."""
        return len(self.placement[stage])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that takes a microbatch through a stage; -1 outside the pipeline."""
        ranks = self._ranks.get(stage, (-1,))
        return ranks[0] if len(ranks) == 1 else ranks[self.replica_of(microbatch // self.slices, len(ranks))]

    def indices(self, microbatches: int) -> int:
        """Return the number of indices that so many whole microbatches have."""
        return microbatches * self.slices

    def whole(self, index: int) -> int:
        """Return the whole microbatch that an index belongs to."""
        return index // self.slices

    def continues(self, index: int) -> bool:
        """Return whether an index belongs to the same microbatch as the one before it."""
        return index % self.slices > 0

    def part_of(self, index: int) -> str:
        """Return `` on slice 1 of 2`` for messages; nothing for a whole microbatch."""
        return f" on slice {index % self.slices} of {self.slices}" if self.slices > 1 else ""

    def name_of(self, microbatch: int) -> str:
        """Return ``microbatch 3`` for messages, or ``microbatch 1, slice 1``."""
        part = f", slice {microbatch % self.slices}" if self.slices > 1 else ""
        return f"microbatch {self.whole(microbatch)}{part}"

    def of_rank_at(self, turn: int, stage: int, rank: int) -> int:
        """Return the microbatch that a rank takes through a stage in a turn, from 0."""
        return self.microbatch_of(turn, self.placement[stage].index(rank), self.width(stage))

    @cached_property
    def _ranks(self) -> Mapping[int, Sequence[int]]:
        return dict(enumerate(self.placement))

    def update_of(self, stage: int, microbatch: int) -> int:
        """Return the update of a stage that takes the gradient of a microbatch."""
        return microbatch // self.per_update(stage)

    def per_update(self, stage: int) -> int:
        """Return the number of microbatches of a complete update of a stage."""
        return self.update_every if self.flush else self.update_every * self.width(stage)

    @cached_property
    def per_step(self) -> int:
        """The fewest microbatches with which every stage makes complete updates: one step of training."""
        return lcm(*map(self.per_update, range(len(self.placement))))

    @property
    def step_microbatches(self) -> int:
        """The whole microbatches of a step of training, see :attr:`per_step`."""
        return self.whole(self.per_step)

    def has_update(self, stage: int, update: int) -> bool:
        """Tell whether there is a microbatch for an update of a stage."""
        return self.has_microbatch(update * self.per_update(stage))

    def in_update(self, stage: int, update: int) -> range:
        """Return the microbatches of an update of a stage."""
        return self._existing(update * self.per_update(stage), self.per_update(stage))

    def in_step(self, step: int) -> range:
        """Return the microbatches of a step of training, see :attr:`per_step`."""
        return self._existing(step * self.per_step, self.per_step)

    def _existing(self, first: int, count: int) -> range:
        beyond = first + count
        while beyond > first and not self.has_microbatch(beyond - 1):
            beyond -= 1
        return range(first, beyond)

    def share(self, owner: int, update: int, stage: int, rank: int) -> Sequence[int]:
        """Return the microbatches of an update of ``owner`` that ``rank`` takes through ``stage``, in order.

        Their gradients are what is shared out: none where the stage trains nothing.
        """
        return self.taken(self.in_update(owner, update), stage, rank)

    def taken(self, microbatches: range, stage: int, rank: int) -> Sequence[int]:
        """Return those microbatches that ``rank`` takes: every ``width``-th; none where it is no rank of the stage, or
        the stage trains nothing."""
        width = self.width(stage)
        replica = self.placement[stage].index(rank) if rank in self.placement[stage] and self.trains(stage) else -1
        if self.slices > 1:
            return [index for index in microbatches if self.replica_of(index // self.slices, width) == replica]
        for first in microbatches[:width]:
            if self.replica_of(first, width) == replica:
                return microbatches[first - microbatches.start::width]
        return ()

    def contributors(self, owner: int, update: int, stage: int) -> list[int]:
        """Return the ranks of ``stage`` that make any gradient of an update of ``owner``, in replica order."""
        ranks, microbatches = self.placement[stage], self.in_update(owner, update)
        if len(microbatches) >= len(ranks) * self.slices and self.trains(stage):
            return list(ranks)
        return [rank for rank in ranks if self.taken(microbatches, stage, rank)]


def stages_of_rank(placement: Placement, rank: int) -> list[int]:
    """Return the stages that live on ``rank``, in order."""
    return [stage for stage, ranks in enumerate(placement) if rank in ranks]


def passes(placement: Placement, rank: int) -> int:
    """Return how many stages of a rank the same microbatch passes, at most.

    These are all of them, unless they are copies for different microbatches.
    """
    own = [(placement[stage].index(rank), len(placement[stage])) for stage in stages_of_rank(placement, rank)]
    if len(set(own)) == 1:
        return len(own)
    return max(sum(Assignment.replica_of(microbatch, width) == replica for replica, width in own)
               for microbatch in range(lcm(*(width for _, width in own))))


def describe_rank(placement: Placement, rank: int, lanes: Sequence[Sequence[int]] = ()) -> str:
    """Return a rank with its stages for messages: ``rank 2 (stage 2)``, ``rank 5 (lane 1, stage 2)``.

    Args:
        rank: of the job where there are several pipelines side by side.
        lanes: the job's ranks of each of these.
    """
    lane, place = next(((f"lane {number}, " * (len(lanes) > 1), own.index(rank)) for number, own in enumerate(lanes)
                        if rank in own), ("", rank))
    stages = stages_of_rank(placement, place)
    return f"rank {rank} ({lane}stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"


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
