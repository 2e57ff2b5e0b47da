"""The application: the command ``vpipe``, which trains models of configs, on the library's public names alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.app.recorded_run import RecordedRun

__all__ = ["RecordedRun"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from vpipe.app.recorded_run import RecordedRun  # what only lists checkpoints must not wait for torch

    return RecordedRun
