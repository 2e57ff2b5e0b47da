"""Refuse what a script changes while microbatches are in flight: which stage sees a change would depend on the
transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

from vpipe.errors import UserError
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_layers import Marks
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.surroundings import P, Surroundings, T


class ScriptChanges:
    """Notice changes of weights and parameter groups between two marks.

    Args:
        stages, optimizers: of this process.
        schedule: its name.
        surroundings: under which functions of the script's run.

    Attributes:
        inside: the function of the script's that runs in the middle of an update; None: none does.
    """

    def __init__(self, stages: Sequence[Stage], optimizers: Sequence[StageOptimizer], schedule: str,
                 surroundings: Surroundings) -> None:
        self._stages, self._optimizers, self._schedule = stages, optimizers, schedule
        self._surroundings = surroundings
        self._marked: tuple[str, list[Marks]] | None = None  # since when, with marks
        self.inside: str | None = None

    def mark(self, when: str) -> None:
        """Let :meth:`check` refuse what changes from now on; ``when``: for its error."""
        self._marked = when, self._marks()

    def forget(self) -> None:
        """Allow what was changed: nothing is in flight any more."""
        self._marked = None

    def check(self, sampled: bool = True) -> None:
        """Refuse what a script changed since the latest mark; ``sampled``: also a change of ``p.data`` in place.

        Raises:
            UserError: something changed.
        """
        (when, marks), self._marked = self._marked or ("", []), None
        for before, now in zip(marks, self._marks(sampled) if marks else (), strict=True):
            if before != now:
                name = next((new or old)[0] for old, new in zip_longest(
                    zip(*before, strict=True), zip(*now, strict=True), fillvalue=()) if old != new)
                what = f"'{name}'" if name else "a parameter group of an optimizer"
                if name:  # what is under way has the rates of before
                    self._marked = when, marks
                raise UserError(f"{what} was changed {when}, while '{self._schedule}' has microbatches in flight",
                                hint="change it in the body of the loop, without a flush after drain() or at a pause; "
                                     "give learning rates as learning_rate_factor=lambda step: ...")

    def calling(self, function: Callable[P, T], name: str, in_flight: Callable[[], bool]) -> Callable[P, T]:
        """Return a function of the script's that may change nothing while there are microbatches ``in_flight``."""
        function = self._surroundings.calling(function)

        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            if not in_flight():
                return function(*arguments, **keywords)
            self._marked, self.inside = (f"by {name}", self._marks(sampled=False)), name
            try:
                return function(*arguments, **keywords)
            finally:
                self.inside = None
                self.check(sampled=False)  # quicker: this is done in every update
        return call

    def _marks(self, sampled: bool = True) -> list[Marks]:
        for stage in self._stages:
            stage.use_latest()  # a module may be the user's own, who looks at it
        options = [optimizer.options() for optimizer in self._optimizers]
        return [*chain.from_iterable([stage.marks(sampled) for stage in self._stages]),
                ([""] * len(options), options)]
