"""Measure the layers of a model and the links between ranks, for the planner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.profiling.measurement import measure

__all__ = ["measure"]


def __getattr__(name: str) -> object:
    if name != "measure":
        raise AttributeError(f"module 'vpipe.profiling' has no attribute '{name}'")
    return import_module("vpipe.profiling.measurement").measure  # measuring needs the runtime
