"""Pipeline-parallel training for PyTorch in which a schedule is data."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from vpipe.moved import MovedModules

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
_HOME = {"Layer": "vpipe.model.layer", "Model": "vpipe.model.model",
         "Pipeline": "vpipe.pipeline", "Plan": "vpipe.plan.plan", "Cut": "vpipe.description.cut",
         "Order": "vpipe.description.order", "Asynchronous": "vpipe.description.order",
         "Update": "vpipe.description.update", "Precision": "vpipe.description.precision",
         "Transfers": "vpipe.description.transfers", "Execution": "vpipe.description.execution"}

sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'vpipe' has no attribute '{name}'")
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    if not frame.f_globals.get("__name__", "").startswith("vpipe."):  # the application prints its errors itself
        import_module("vpipe.distributed.excepthook").install()
    return getattr(import_module(_HOME[name]), name)
