"""The programs that the ranks of this process carry out: of a batch, of a stream, of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from vpipe.runtime.worker import IsSplit, VersionOf
from vpipe.schedules.action import Action, Op
from vpipe.schedules.lower import Lowering
from vpipe.schedules.order import Schedule, stages_of_rank, stream_program
from vpipe.schedules.reading import Reading
from vpipe.schedules.registry import Recipe
from vpipe.schedules.rounds import Rounds
from vpipe.schedules.seat import seats
from vpipe.schedules.transfer_order import TransferOrder, in_one_order
from vpipe.schedules.wavefront import wavefront


@dataclass(frozen=True)
class Program:
    """A rank's lowered actions, the versions of borrowed weights that its microbatches use, which are split."""

    actions: Iterator[Action]
    version_of: VersionOf
    is_split: IsSplit


class Programs:
    """What becomes of a schedule when it meets data.

    Args:
        schedule: lowered.
        recompute: stages that recompute activations.
        ordered: whether transfers must come in one order, see :mod:`vpipe.schedules.transfer_order`.
    """

    def __init__(self, schedule: Schedule, recompute: Collection[int], ordered: bool) -> None:
        if ordered and schedule.recipe is None:
            schedule, _ = in_one_order(Reading.of(schedule))
        self._schedule, self._recompute, self._ordered = schedule, recompute, ordered
        self._split = frozenset((action.stage, action.microbatch) for program in schedule.programs for action in program
                                if action.op is Op.INPUT)
        self._versions = Reading.of(schedule).version
        self._evaluations: dict[int, Schedule] = {}  # the latest, by its number of microbatches

    def rounds(self, exists: Callable[[int], bool]) -> Rounds:
        """How the microbatches that there are will be divided."""
        return replace(self._schedule.rounds, exists=exists)

    def of_batch(self, rank: int) -> Program:
        """All of a rank's program: lowered once, the same for every batch."""
        return Program(iter(self._schedule.programs[rank]), lambda owner, microbatch: self._versions[owner, microbatch],
                       lambda stage, microbatch: (stage, microbatch) in self._split)

    def of_stream(self, rounds: Rounds, recipe: Recipe) -> Callable[[int], Program]:
        """The lowered program of a rank over the microbatches that come.

        It is the program for very many microbatches less the actions on those that never come; see
        :data:`vpipe.schedules.registry.Program`.
        """
        split, placement = {stage for stage, _ in self._split}, self._schedule.placement
        seated = seats(recipe, placement, self._schedule.microbatches, rounds.update_every)

        def compute(rank: int) -> Iterator[Action]:
            return stream_program(recipe, seated[rank], rounds, stages_of_rank(placement, rank), self._recompute)

        def program(rank: int) -> Program:
            lowered = {every: Lowering(rounds, every, compute, self._schedule.ties)
                       for every in (range(self._schedule.ranks) if self._ordered else (rank,))}
            actions = lowered[rank].program()
            if self._ordered:
                order = TransferOrder(
                    rounds, self._schedule.ties, [lowering.program() for lowering in lowered.values()],
                    lambda of, owner, microbatch: lowered[of].version_of(owner, microbatch), normed=False, ranks=[rank])
                actions = order.program(rank)
            return Program(actions, lowered[rank].version_of, lambda stage, microbatch: stage in split)

        return program

    def of_evaluation(self, microbatches: int) -> Callable[[int], Program]:
        """Every microbatch forward through all stages."""
        if microbatches not in self._evaluations:
            schedule = wavefront(self._schedule.placement, microbatches)
            self._evaluations = {microbatches: in_one_order(Reading.of(schedule))[0] if self._ordered else schedule}
        programs = self._evaluations[microbatches].programs
        return lambda rank: Program(iter(programs[rank]), lambda owner, microbatch: 0, lambda stage, microbatch: False)
