"""Plans: from a profile to the cut, the recomputation and the schedule that take least time within a memory limit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.plan.prediction import predict
    from vpipe.plan.profile import Profile
    from vpipe.plan.solver.request import PlanRequest
    from vpipe.plan.solver.solve import solve

__all__ = ["PlanRequest", "Profile", "predict", "solve"]

# Loaded when first asked for: to read a plan, nobody needs the solver and numpy. Plan itself is vpipe.Plan.
_HOME = {"PlanRequest": "solver.request",
         "Profile": "profile", "predict": "prediction",
         "solve": "solver.solve"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'vpipe.plan' has no attribute '{name}'")
    return getattr(import_module(f"vpipe.plan.{_HOME[name]}"), name)
