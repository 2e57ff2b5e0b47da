"""Whether there are as many processes, hosts and GPUs as a config asks for; found out before any data are opened."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from vpipe.errors import UserError, counted
from vpipe.launch.hosts import Hosts
from vpipe.schedules.arrange import Wanted
from vpipe.train.config import Config


def ranks_of(config: Config) -> int:
    """The ranks of the schedule.

    Raises:
        UserError: there is no such schedule.
    """
    parallel = config.parallel.standing_in
    return Wanted(parallel.schedule, parallel.model_parallel_size, config.training.num_microbatches,
                  parallel.update_every, parallel.placement, parallel.chunks,
                  replicas=1 if parallel.placement else parallel.data_parallel_size).arranged().ranks


def hosts_of(config: Config) -> Hosts | None:
    """The hosts of ``machines``; None when all ranks are here.

    Raises:
        UserError: they are not as many as the ranks, or the first is not this host.
    """
    if config.machines is None:
        return None
    ranks = ranks_of(config)
    if len(config.machines) != ranks:
        raise UserError(f"machines lists {len(config.machines)}, but the schedule has {counted(ranks, 'rank')}",
                        hint="give one host:gpu per rank")
    hosts = Hosts.of(config.machines)
    if hosts.logins[0] not in hosts.here:
        raise UserError(f"the first host of machines, '{hosts.name(0)}', is not this one ('{socket.gethostname()}')",
                        hint="start vpipe there, or begin the list with this host")
    return hosts


def own_device(config: Config, device: int) -> int:
    """The number of a rank's GPU, whose starter may show each rank one GPU only and yet count the ranks of a host."""
    if not config.parallel.on_gpu:
        return device
    import torch

    return 0 if torch.cuda.device_count() == 1 else device


def check_gpus(config: Config, devices: Iterable[int]) -> None:
    """Refuse to compute on GPUs where there is none, and backend nccl where a rank has none of its own.

    Args:
        devices: the number of each rank's GPU on this host.

    Raises:
        UserError: a GPU is missing, or two ranks want the same one.
    """
    if not config.parallel.on_gpu:
        return
    import torch

    wanted, gpus = list(devices), torch.cuda.device_count()
    if config.parallel.backend == "gloo":
        if not gpus:
            raise UserError("parallel.device is cuda, but this host has no GPU", hint="leave it out, or set it to cpu")
        return
    hint = "set parallel.backend to gloo (in VPipe's form, 'distributed_backend': 'gloo')"
    if len(set(wanted)) < len(wanted):
        raise UserError(f"backend nccl needs a GPU per rank, but two ranks of a host are given the same: {wanted}",
                        hint=f"number them from 0 to {len(wanted) - 1}, or {hint}")
    if gpus <= max(wanted):
        raise UserError(f"backend nccl needs a GPU per rank: {counted(len(wanted), 'rank')}, {counted(gpus, 'GPU')}" +
                        (f", counted from 0, but GPU {max(wanted)} is wanted" if max(wanted) >= len(wanted) else ""),
                        hint=hint)
