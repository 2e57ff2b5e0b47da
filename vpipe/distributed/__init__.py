"""Join the processes of a job, exchange values between them, and end them together when one fails."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.distributed.environment import RankEnvironment
    from vpipe.distributed.init import exchange, join_world
    from vpipe.distributed.watchdog import watch

__all__ = ["RankEnvironment", "exchange", "join_world", "watch"]

# Loaded when first asked for: a launcher must not wait for torch.
_HOME = {"RankEnvironment": "environment", "exchange": "init", "join_world": "init", "watch": "watchdog"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'vpipe.distributed' has no attribute '{name}'")
    return getattr(import_module(f"vpipe.distributed.{_HOME[name]}"), name)
