"""Joining the processes of one job."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from vpipe.errors import RunError, UserError


def join_world(backend: str = "gloo", timeout_s: float = 60.0) -> int:
    """Join the job that torchrun, or vpipe's own launcher, started; the number of its processes, 0 when alone.

    The launchers say so in the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which is the
    one place where the library reads it. A process group that exists already is used as it is.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0
    if backend == "nccl" and torch.cuda.device_count() < 1:
        raise UserError("backend nccl, but this machine has no GPU", hint="use backend: gloo")
    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RunError(f"rank {rank} could not join the others: {str(error).splitlines()[0]}",
                       hint="a rank ended or is slow to start: see its log, or raise parallel.timeout_s",
                       rank=rank, peer=0 if rank else None) from error
    atexit.register(_leave)
    return dist.get_world_size()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
