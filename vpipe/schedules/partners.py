"""Which sends and receives belong together, and on which ranks they stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vpipe.schedules.action import Action, Op
from vpipe.schedules.rounds import Rounds
from vpipe.schedules.size import Placement

OnRank = tuple[Action, int]
"""An action and the rank that executes it."""

_NEIGHBOUR = {Op.SEND_F: (Op.RECV_F, 1), Op.RECV_F: (Op.SEND_F, -1),
              Op.SEND_B: (Op.RECV_B, -1), Op.RECV_B: (Op.SEND_B, 1)}  # the other end, and its stage seen from here
_TIED = {Op.SEND_W: Op.RECV_W, Op.RECV_W: Op.SEND_W, Op.SEND_G: Op.RECV_G, Op.RECV_G: Op.SEND_G}


def borrowing_ranks(placement: Placement, owner: int, borrowers: Iterable[int], rank: int) -> list[int]:
    """Return the ranks that get the tied weights of ``owner`` from ``rank``, one of its replicas."""
    width = len(placement[owner])
    return [borrower for replica, borrower in
            sorted({replica for stage in borrowers for replica in enumerate(placement[stage])})
            if placement[owner][replica % width] == rank]


@dataclass(frozen=True)
class Partners:
    """Find the other ends of transfers.

    Attributes:
        rounds: says which rank takes a microbatch.
        ties: stages that borrow a stage's tied weights, by owning stage.
    """

    rounds: Rounds
    ties: Mapping[int, Sequence[int]]

    @cached_property
    def borrowing(self) -> Mapping[int, Sequence[int]]:
        """By owning stage, the ranks with a stage that borrows its tied weights."""
        return {owner: sorted({rank for stage in borrowers if self._exists(stage)
                               for rank in self.rounds.placement[stage]})
                for owner, borrowers in self.ties.items()}

    @cached_property
    def lending(self) -> Mapping[tuple[int, int], Sequence[int]]:
        """By owning stage and rank, those of them that get the weights from that rank."""
        return {(owner, rank): borrowing_ranks(self.rounds.placement, owner, borrowers, rank)
                for owner, borrowers in self.ties.items() if all(map(self._exists, (owner, *borrowers)))
                for rank in self.rounds.placement[owner]}

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that takes a microbatch through a stage; -1 outside the pipeline."""
        return self.rounds.rank_of(stage, microbatch) if self._exists(stage) else -1

    def of(self, transfer: Action, rank: int) -> list[OnRank]:
        """Return the other ends of a send or a receive; none when it leads out of the pipeline.

        Activations and their gradients have no other end on their own rank. Tied weights do: there they change hands.
        """
        op, stage, index = transfer.op, transfer.stage, transfer.microbatch
        if op in _NEIGHBOUR:
            other, offset = _NEIGHBOUR[op]
            peer = self.rank_of(stage + offset, index)
            return [(Action(other, stage + offset, index), peer)] if peer not in (-1, rank) else []
        return [(Action(_TIED[op], stage, index), peer) for peer in self._tied_peers(op, stage, index, rank)]

    def gradient_senders(self, owner: int, update: int) -> list[int]:
        """Return the ranks that send tied gradients of an update to the owner's ranks, as they come to it.

        A rank sends behind its last backward of the update, later stages before earlier ones.
        """
        last: dict[int, tuple[int, int]] = {}
        for borrower in filter(self._exists, self.ties.get(owner, ())):
            for rank in self.rounds.placement[borrower]:
                if share := self.rounds.share(owner, update, borrower, rank):
                    last[rank] = max(last.get(rank, (-1, 0)), (share[-1], -borrower))
        return sorted(last, key=lambda rank: (last[rank], rank))

    def _exists(self, stage: int) -> bool:
        return 0 <= stage < len(self.rounds.placement)

    def _tied_peers(self, op: Op, stage: int, index: int, rank: int) -> Sequence[int]:
        owners = self.rounds.placement[stage]
        if op is Op.SEND_W:
            return self.lending.get((stage, rank), ())
        if op is Op.RECV_W:
            return [owner for owner in owners if rank in self.lending.get((stage, owner), ())]
        if op is Op.SEND_G:
            return owners
        return self.gradient_senders(stage, index)
