"""The size of a pipeline, and the placement of its stages on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from vpipe.description.cut import Placement as Placement
from vpipe.errors import UserError, counted

MOST_STAGES, MOST_RANKS, MOST_MICROBATCHES = 1024, 16_384, 65_536

MOST_ACTIONS = 250_000
"""Forwards and backwards of a schedule whose actions are listed: to prove it takes half a minute and 300 MB."""

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


def first_missing(ranks: Iterable[int]) -> int:
    """Return the smallest number, from 0 on, that is no rank's."""
    present = set(ranks)
    return next(number for number in count() if number not in present)


def check_work(ranks: int, microbatches: int, chunks: int = 1, *, replicated: bool = False, why: str = "",
               most: int = MOST_ACTIONS) -> None:
    """Refuse a schedule that takes too long to prove, before any of it is made.

    Args:
        ranks: of all replicas.
        replicated: some are replicas. Their sums cost no more than what is counted.
        why: explains the number of microbatches, where nobody asked for it.

    Raises:
        UserError: with the numbers.
    """
    actions = 2 * ranks * microbatches * chunks
    if actions > most:
        raise UserError(f"{counted(ranks, 'rank')} and {counted(microbatches, 'microbatch')}{why} are {actions:,} "
                        f"forwards and backwards{' or parts of sums' * replicated}",
                        hint=f"stay below {most:,}: use fewer microbatches, stages or replicas")
