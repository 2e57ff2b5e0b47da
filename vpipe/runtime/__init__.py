"""Run a pipeline: the stages, their transfers, and the interpreter of a schedule's actions.

What others than :class:`vpipe.Pipeline` need of it:
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.runtime.preparation import prepare_schedule, threads_refused
    from vpipe.runtime.stage_usage import StageUsage
    from vpipe.runtime.step_results import Step
    from vpipe.runtime.transport.ring import Ring

__all__ = ["Ring", "StageUsage", "Step", "prepare_schedule", "threads_refused"]

# Loaded when first asked for: a config is read without torch.
_FILES = {"Ring": "transport.ring", "StageUsage": "stage_usage", "Step": "step_results",
          "prepare_schedule": "preparation", "threads_refused": "preparation"}


def __getattr__(name: str) -> object:
    if name not in _FILES:
        raise AttributeError(f"module 'vpipe.runtime' has no attribute '{name}'")
    return getattr(import_module(f"vpipe.runtime.{_FILES[name]}"), name)
