"""Checkpoints: a folder per step, of tensors by global name, whatever arrangement of ranks wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.checkpoint.checkpoint import Checkpoint
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import Manifest
from vpipe.lazy import lazy

if TYPE_CHECKING:
    from vpipe.checkpoint.save import Saver

__all__ = ["Checkpoint", "Checkpoints", "Manifest", "Saver"]

# Loaded when first asked for: checkpoints are listed without torch.
__getattr__ = lazy(__name__, {"Saver": "save"})
