"""From a profile to a plan: partition, recomputation, replicas, schedule and microbatches within a memory limit."""

from vpipe.plan.solver.request import Alternative, PlanRequest, Solution
from vpipe.plan.solver.solve import better_partition, solve, without_recompute

__all__ = ["Alternative", "PlanRequest", "Solution", "better_partition", "solve", "without_recompute"]
