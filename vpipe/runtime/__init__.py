"""Run a pipeline: the stages, their transfers, and the interpreter of a schedule's actions.

What others than :class:`vpipe.Pipeline` need of it:
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.lazy import lazy
from vpipe.schedules.builder import prepare_schedule

if TYPE_CHECKING:
    from vpipe.runtime import transport
    from vpipe.runtime.slices import check_slices
    from vpipe.runtime.stage_usage import StageUsage
    from vpipe.runtime.step_results import Step
    from vpipe.runtime.worker import Worker

__all__ = ["StageUsage", "Step", "Worker", "check_slices", "prepare_schedule", "transport"]

# Loaded when first asked for: a config is read without torch.
__getattr__ = lazy(__name__, {
    "StageUsage": "stage_usage", "Step": "step_results", "Worker": "worker", "check_slices": "slices"})
