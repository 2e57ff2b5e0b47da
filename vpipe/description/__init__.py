"""The parts that describe a pipeline: each checks itself when it is made, and is then passed on as it is."""

from __future__ import annotations

from dataclasses import dataclass

from vpipe.description.cut import Cut
from vpipe.description.execution import Execution, Executor
from vpipe.description.order import Order
from vpipe.description.precision import Precision
from vpipe.description.transfers import Transfers
from vpipe.description.update import Update

__all__ = ["Description", "Executor"]


@dataclass(frozen=True)
class Description:
    """What Python, a config and every rank hold of a pipeline.

    Attributes:
        microbatches: equal parts into which every batch is cut along dimension 0.
        seed: of initialisation and dropout; both are independent of the cut.
    """

    cut: Cut
    order: Order
    microbatches: int
    update: Update
    precision: Precision
    transfers: Transfers
    execution: Execution
    seed: int

    @property
    def needs_norms(self) -> bool:
        """Whether an update depends on the norms of gradients: with a flush on those of all stages."""
        return self.update.grad_clip is not None or self.update.skip_not_finite or self.precision.scaled

    @property
    def delay_correction(self) -> float:
        """The share of its delay over which a step is extrapolated."""
        return self.order.late.delay_correction or 0.0
