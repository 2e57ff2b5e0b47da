"""The device of a rank of a run, as its config says."""

from __future__ import annotations

import torch

from vpipe.config.config import Config
from vpipe.distributed.device import DeviceMap, Visible, choose_device, make_current
from vpipe.distributed.init import join_world


def on_processors(config: Config) -> bool:
    """Whether ranks on this host compute on its processors."""
    parallel = config.parallel
    return parallel.device == "cpu" or (not parallel.asks_for_gpus and torch.cuda.device_count() == 0)


def device_of(config: Config) -> torch.device:
    """Return the device of this rank, which becomes the current one.

    Raises:
        UserError: it is not there.
    """
    device = choose_device(config.parallel.device, config.parallel.backend, Visible.here())
    make_current(device)
    return device


def join(config: Config) -> DeviceMap:
    """Join the other ranks of a run, see :func:`~vpipe.distributed.init.join_world`."""
    return join_world(config.parallel.backend, config.parallel.timeout_s, config.parallel.device)
