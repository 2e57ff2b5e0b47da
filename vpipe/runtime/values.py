"""Hold what the actions of a rank make, from the action that makes a value to the one that ends it."""

from __future__ import annotations

from typing import Any

from vpipe.schedules.kinds import HALF, SAVED, Needed, Value

LOSS = Value("loss")
WANTED = Value("outputs of an evaluation")
KEPT = Value("inputs kept for a later stage of the rank")
OUTLIVING = frozenset({LOSS, WANTED})
"""Values that outlive a segment: who collects the results of a step or an evaluation takes them."""


class Values(dict[Needed, Any]):
    """What a rank holds of microbatches, from (value, stage, index), as the table of kinds names them
    (:mod:`vpipe.schedules.kinds`). An index counts from the beginning of the segment, as that of an action does.

    An action takes what it is the last to need, and puts what it makes.
    """

    def left(self) -> list[str]:
        """Return the names of values that a segment has left behind, and should not have."""
        return list(dict.fromkeys(value.name for value, _, _ in self if value not in OUTLIVING))

    def in_flight(self) -> set[tuple[int, int]]:
        """Return stages with the indices of microbatches of which a forward has left something for its backward."""
        return {(stage, index) for value, stage, index in self if value is SAVED or value is HALF}

    def take_all(self, value: Value) -> list[Any]:
        """Take all of a value, in the order of stages and indices."""
        return [self.pop((value, *place)) for place in sorted(key[1:] for key in self if key[0] is value)]
