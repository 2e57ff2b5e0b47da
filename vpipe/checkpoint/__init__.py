"""Checkpoints: a folder per step, of tensors by global name, whatever arrangement of ranks wrote them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vpipe.checkpoint.checkpoint import Checkpoint
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import CheckpointInfo, Manifest, TensorEntry

if TYPE_CHECKING:
    from vpipe.checkpoint.save import Saver, SaveResult, save_weights

__all__ = ["Checkpoint", "CheckpointInfo", "Checkpoints", "Manifest", "SaveResult", "Saver", "TensorEntry",
           "save_weights"]


def __getattr__(name: str) -> object:
    if name not in __all__:  # loaded when first asked for: checkpoints are listed without torch
        raise AttributeError(f"module 'vpipe.checkpoint' has no attribute '{name}'")
    return getattr(import_module("vpipe.checkpoint.save"), name)
