"""Join the processes of a job, exchange values between them, and end them together when one fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.lazy import lazy

if TYPE_CHECKING:
    from vpipe.distributed.environment import RankEnvironment
    from vpipe.distributed.fault import Fault
    from vpipe.distributed.init import exchange, join_world
    from vpipe.distributed.network import Host
    from vpipe.distributed.watchdog import watch

__all__ = ["Fault", "Host", "RankEnvironment", "exchange", "join_world", "watch"]

# Loaded when first asked for: a launcher must not wait for torch.
__getattr__ = lazy(__name__, {
    "Fault": "fault", "Host": "network", "RankEnvironment": "environment", "exchange": "init", "join_world": "init",
    "watch": "watchdog"})
