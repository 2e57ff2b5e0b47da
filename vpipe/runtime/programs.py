"""The programs that the ranks of this process carry out: of a batch, of a stream, of an evaluation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from vpipe.runtime.feed import Feed
from vpipe.runtime.worker import IsSplit, VersionOf
from vpipe.schedules.action import COMPLETES, Action, Op
from vpipe.schedules.lower import Lowering
from vpipe.schedules.order import Schedule, compute_program, stages_of_rank
from vpipe.schedules.reading import Reading
from vpipe.schedules.registry import Recipe
from vpipe.schedules.size import Size
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
    """

    def __init__(self, schedule: Schedule, recompute: Collection[int]) -> None:
        self._schedule, self._recompute = schedule, recompute
        self._split = frozenset((action.stage, action.microbatch) for program in schedule.programs for action in program
                                if action.op is Op.INPUT)
        self._versions = Reading.of(schedule).version
        self._evaluations: dict[int, Schedule] = {}  # the latest, by its number of microbatches

    @property
    def endless(self) -> Size:
        """The numbers of a stream of which nobody knows the end."""
        ranks = self._schedule.ranks
        return Size(ranks, sys.maxsize, self._schedule.stages // ranks, self._schedule.update_every)

    def of_batch(self, rank: int) -> Program:
        """All of a rank's program: lowered once, the same for every batch."""
        return Program(iter(self._schedule.programs[rank]), lambda owner, microbatch: self._versions[owner, microbatch],
                       lambda stage, microbatch: (stage, microbatch) in self._split)

    def of_stream(self, feed: Feed, first: int, recipe: Recipe) -> Callable[[int], Program]:
        """The lowered program of a rank over the microbatches that come, from ``first`` of the feed on.

        It is the program for very many microbatches less the actions on those that never come; see
        :data:`vpipe.schedules.registry.Program`.
        """
        split, every = {stage for stage, _ in self._split}, self._schedule.update_every

        def comes(action: Action) -> bool:
            if action.op is Op.STEP:
                return feed.has(first + (action.microbatch + 1) * every - 1)
            if action.op is Op.USE:
                return action.microbatch == 0 or feed.has(first + action.microbatch * every - 1)
            return feed.has(first + action.microbatch)

        def compute(rank: int) -> Iterator[Action]:
            completed: Counter[int] = Counter(dict.fromkeys(stages_of_rank(self._schedule.placement, rank), 0))
            stepped = completed.copy()
            for action in compute_program(recipe, self._schedule.placement, rank, self.endless, self._recompute):
                if comes(action):
                    yield action
                    completed[action.stage] += action.op in COMPLETES
                    stepped[action.stage] += every * (action.op is Op.STEP)
                elif all(done == feed.total - first for done in (*completed.values(), *stepped.values())):
                    return

        def program(rank: int) -> Program:
            lowering = Lowering(self._schedule.placement, rank, compute, every, self._schedule.ties)
            return Program(lowering.program(), lambda owner, microbatch: lowering.versions[owner].of(microbatch),
                           lambda stage, microbatch: stage in split)

        return program

    def of_evaluation(self, microbatches: int) -> Callable[[int], Program]:
        """Every microbatch forward through all stages."""
        if microbatches not in self._evaluations:
            self._evaluations = {microbatches: wavefront(self._schedule.placement, microbatches)}
        programs = self._evaluations[microbatches].programs
        return lambda rank: Program(iter(programs[rank]), lambda owner, microbatch: 0, lambda stage, microbatch: False)
