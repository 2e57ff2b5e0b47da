"""Describe how a model is cut: the layers of every stage, what is recomputed of them, and the ranks of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vpipe.arguments import Arguments, as_integer, shown
from vpipe.description.recompute import MOST_LAYERS, Recompute, ranges, recomputed_layers
from vpipe.errors import UserError

Placement = tuple[tuple[int, ...], ...]
"""The ranks of every stage: ``((0,), (1,))`` is stage 0 on rank 0 and stage 1 on rank 1. Several of one stage hold
copies of it, of which microbatch m takes number m modulo their count."""


@dataclass(frozen=True)
class Cut:
    """How a model is cut.

    Attributes:
        stages: how many, with equally many parameters as far as layers allow (docs/concepts.md, for frozen
            ones); or the layers of each, such as ``[3, 2, 2, 2]``. As many as ``ranks`` lists when None.
        recompute: layers that are recomputed: a share of each stage's, from its end, as one number or one per stage;
            for a stage also a list of layers by their numbers in the model.
        ranks: of every stage: how many, on consecutive ranks in the schedule's own order; or which, such as
            ``[[0, 1], [2]]``. Several are replicas: microbatch i goes to replica i mod their number.

    Raises:
        UserError: a value is of another kind, or the three do not fit each other.
    """

    MOST_LAYERS = MOST_LAYERS
    """The most layers of all stages, where they are listed."""

    stages: int | Sequence[int] | None = None
    recompute: Recompute = 0.0
    ranks: int | Sequence[Sequence[int]] = 1

    def __post_init__(self) -> None:
        given = Arguments()
        stages, ranks = _stages(given, self.stages), _ranks(given, self.ranks)
        if self.recompute is None:
            given.refuse("recompute is None", "give a number from 0 to 1, or a list with one per stage")
        given.check()
        if stages is None and isinstance(ranks, tuple):
            stages = len(ranks)
        if stages == ():
            raise UserError("the partition is empty", hint="give the layers of at least one stage, such as [3, 2]")
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "ranks", ranks)
        if isinstance(self.recompute, Sequence) and not isinstance(self.recompute, str):
            object.__setattr__(self, "recompute", tuple(
                tuple(sorted(entry)) if isinstance(entry, (list, tuple, frozenset)) and all(
                    type(layer) is int for layer in entry) else entry for entry in self.recompute))
        if isinstance(stages, tuple):
            _ = self.recomputed  # refuses what does not fit

    @property
    def count(self) -> int:
        """The number of stages."""
        assert self.stages is not None, "a pipeline has asked for it"
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def partition(self) -> tuple[int, ...]:
        """The layers of every stage, where they are known."""
        assert isinstance(self.stages, tuple), "the layers are counted"
        return self.stages

    @property
    def layers(self) -> list[range]:
        """The numbers, in the model, of the layers of every stage, where they are known."""
        return ranges(self.partition)

    @property
    def placement(self) -> Placement | None:
        """The ranks of every stage, where they are listed."""
        return self.ranks if isinstance(self.ranks, tuple) else None

    @property
    def replicas(self) -> int:
        """The ranks of every stage, where they are counted; 1 where they are listed."""
        return self.ranks if isinstance(self.ranks, int) else 1

    @cached_property
    def recomputed(self) -> tuple[frozenset[int], ...]:
        """Per stage the numbers, in the model, of the layers that are recomputed.

        Raises:
            UserError: ``recompute`` does not fit the stages.
        """
        return recomputed_layers(self.recompute, self.partition) if self.recompute else (frozenset[int](),) * self.count


def _stages(given: Arguments, stages: Any) -> Any:
    if stages is None or as_integer(stages) is not None or isinstance(stages, (str, float, bool)):
        return given.integer("stages", stages, or_none=True)
    found = given.integers("stages", stages, "[3, 2, 2, 2]")
    if found is not None and None not in found and sum(found) > MOST_LAYERS:
        given.refuse(f"the partition has {sum(found):,} layers in all", f"use {MOST_LAYERS:,} at most")
    return None if found is None else tuple(found)


def _ranks(given: Arguments, ranks: Any) -> Any:
    if as_integer(ranks) is not None or isinstance(ranks, (str, bool, float)):
        return given.integer("ranks", ranks, least=1)
    if not isinstance(ranks, (list, tuple)) or not all(
            isinstance(own, (list, tuple)) and all(type(rank) is int for rank in own) for own in ranks):
        given.refuse(f"ranks is {shown(ranks)}, which does not list the ranks of every stage",
                     "write how many every stage has, or a list of lists of whole numbers, such as [[0, 1], [2]]")
        return 1
    return tuple(map(tuple, ranks)) or 1
