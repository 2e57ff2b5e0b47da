"""Join the processes of a job, exchange values between them, and end them together when one fails."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.distributed.descriptors import name_if_none_left, reserve_for_starting
    from vpipe.distributed.device import DeviceMap, choose_device
    from vpipe.distributed.environment import RankEnvironment
    from vpipe.distributed.fault import Fault
    from vpipe.distributed.init import exchange, join_world, meet
    from vpipe.distributed.network import Host, check_interfaces
    from vpipe.distributed.value_exchange import Exchange
    from vpipe.distributed.watchdog import watch

__all__ = ["DeviceMap", "Exchange", "Fault", "Host", "RankEnvironment", "check_interfaces", "choose_device", "exchange",
           "join_world", "meet", "name_if_none_left", "reserve_for_starting", "watch"]

# Loaded when first asked for: a launcher must not wait for torch.
_HOME = {"DeviceMap": "device", "Exchange": "value_exchange", "Fault": "fault", "Host": "network",
         "RankEnvironment": "environment", "check_interfaces": "network", "choose_device": "device", "exchange": "init",
         "join_world": "init", "meet": "init", "name_if_none_left": "descriptors",
         "reserve_for_starting": "descriptors", "watch": "watchdog"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'vpipe.distributed' has no attribute '{name}'")
    return getattr(import_module(f"vpipe.distributed.{_HOME[name]}"), name)
