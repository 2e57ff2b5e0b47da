"""Plans: from a profile to the cut, the recomputation and the schedule that take least time within a memory limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.lazy import lazy

if TYPE_CHECKING:
    from vpipe.plan.prediction import predict
    from vpipe.plan.profile import Profile
    from vpipe.plan.solver.request import PlanRequest
    from vpipe.plan.solver.solve import solve

__all__ = ["PlanRequest", "Profile", "predict", "solve"]

# Loaded when first asked for: to read a plan, nobody needs the solver and numpy. Plan itself is vpipe.Plan.
__getattr__ = lazy(__name__, {
    "PlanRequest": "solver.request", "Profile": "profile", "predict": "prediction", "solve": "solver.solve"})
