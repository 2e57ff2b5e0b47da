"""How far training is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vpipe.errors import UserError


@dataclass(frozen=True)
class Position:
    """Where a checkpoint was made, and where a run goes on.

    Attributes:
        steps: that are done; the next one has this index.
        microbatches: that are done, counted over all training. Dropout and stochastic rounding follow their number.
        begun: how many of them are of a batch that has more; training goes on within it. None: what is left over when
            all batches have equally many.
        samples: that they had.
    """

    steps: int
    microbatches: int
    begun: int | None = None
    samples: int = 0

    def within(self, batch: int) -> int:
        """How many microbatches are done of a batch that has more of its ``batch``."""
        return self.microbatches % batch if self.begun is None else self.begun

    def after(self, steps: int, microbatches: int, samples: int, begun: int) -> Position:
        """So many steps, microbatches and samples later, ``begun`` of them of a batch that has more."""
        return Position(self.steps + steps, self.microbatches + microbatches, begun, self.samples + samples)

    def as_numbers(self, batch: int) -> dict[str, int]:
        """As a checkpoint holds it beside the steps and the samples; ``batch``: microbatches of a batch."""
        return {"microbatches": self.microbatches, "begun": self.within(batch), "batch": batch}

    @classmethod
    def of_numbers(cls, steps: int, samples: int, numbers: Mapping[str, Any], batch: int) -> Position:
        """The inverse of :meth:`as_numbers`, where a batch is now cut into ``batch`` microbatches.

        Raises:
            UserError: it does not fall between two of them, or is not known.
        """
        if not steps:  # weights from elsewhere
            return cls(0, 0)
        found = [numbers.get(key) for key in ("microbatches", "begun", "batch")]
        done, begun, then = (count if type(count) is int and count >= 0 else -1 for count in found)
        if not (0 <= begun < then and begun <= done):
            raise UserError(f"the checkpoint of step {steps} does not say how many microbatches are done: it has "
                            + ", ".join(f"{key} {numbers.get(key)!r}" for key in ("microbatches", "begun", "batch")),
                            hint="it was not made by vpipe train or Pipeline.save")
        scaled = []
        for microbatches in (done, begun):
            count, left = divmod(microbatches * batch, then)
            if left:
                raise UserError(f"the checkpoint is of a run with {then} microbatches per batch, and was made after "
                                f"{begun} of them: with {batch} that is within one",
                                hint=f"go on with {then} microbatches per batch, or from another checkpoint")
            scaled.append(count)
        return cls(steps, scaled[0], scaled[1], samples)
