"""Pipeline-parallel training for PyTorch in which a schedule is data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.lazy import lazy

if TYPE_CHECKING:
    from vpipe.description.cut import Cut
    from vpipe.description.execution import Execution
    from vpipe.description.order import Asynchronous, Order
    from vpipe.description.precision import Precision
    from vpipe.description.transfers import Transfers
    from vpipe.description.update import Update
    from vpipe.model.layer import Layer
    from vpipe.model.model import Model
    from vpipe.pipeline import Pipeline
    from vpipe.plan.plan import Plan

__all__ = ["Asynchronous", "Cut", "Execution", "Layer", "Model", "Order", "Pipeline", "Plan", "Precision", "Transfers",
           "Update"]

# Loaded when first asked for: what only reads schedules must not wait for torch.
__getattr__ = lazy(__name__, {
    "Layer": "model.layer", "Model": "model.model", "Pipeline": "pipeline", "Plan": "plan.plan",
    "Cut": "description.cut", "Order": "description.order", "Asynchronous": "description.order",
    "Update": "description.update", "Precision": "description.precision", "Transfers": "description.transfers",
    "Execution": "description.execution"})
