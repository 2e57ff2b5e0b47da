"""Models as lists of layers: :class:`vpipe.Model`, :class:`vpipe.Layer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.model.layer import seed_of

__all__ = ["seed_of"]


def __getattr__(name: str) -> object:
    if name not in __all__:  # loaded when first asked for: it needs torch
        raise AttributeError(f"module 'vpipe.model' has no attribute '{name}'")
    return getattr(import_module("vpipe.model.layer"), name)
