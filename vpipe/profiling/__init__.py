"""Measure the layers of a model and the links between ranks, for the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.lazy import lazy

if TYPE_CHECKING:
    from vpipe.profiling.measurement import measure
    from vpipe.profiling.rank_group import RankGroup

__all__ = ["RankGroup", "measure"]

# Loaded when first asked for: measuring needs the runtime.
__getattr__ = lazy(__name__, {"RankGroup": "rank_group", "measure": "measurement"})
