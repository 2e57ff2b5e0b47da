"""Where a rank computes."""

from __future__ import annotations

import os

import torch

from vpipe.train.config import Config


def device_of(config: Config) -> torch.device:
    """The device of this process; of GPUs the one that its starter gave it, which becomes the current one.

    With gloo a host may have fewer GPUs than ranks: then they share them, in turns.
    """
    if not config.parallel.on_gpu:
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if config.parallel.backend == "gloo":
        number %= max(1, torch.cuda.device_count())
    device = torch.device(f"cuda:{number}")
    torch.cuda.set_device(device)
    return device
