"""Where a rank computes."""

from __future__ import annotations

import os

import torch

from vpipe.train.config import Config


def device_of(config: Config) -> torch.device:
    """The device of this process: with nccl the GPU that its starter gave it, which becomes the current one."""
    if config.parallel.backend != "nccl":
        return torch.device("cpu")
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    torch.cuda.set_device(device)
    return device
