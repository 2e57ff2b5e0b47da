"""A stage of its own, without a pipeline around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vpipe import Model
from vpipe.description.cut import recomputed_layers
from vpipe.runtime.stage import Stage


def stage_of(model: Model, partition: Sequence[int], index: int = 0, recompute: float = 0.0, **more: Any) -> Stage:
    """``recompute``: the share of its layers, the last ones."""
    recomputed = recomputed_layers([recompute if stage == index else 0 for stage in range(len(partition))], partition)
    return Stage(model, model.split(partition)[index], **{
        "seed": 1, "device": torch.device("cpu"), "recomputed": recomputed[index], **more})
