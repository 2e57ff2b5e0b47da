"""Check processes, hosts and GPUs against a config, before any data are opened."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from vpipe.config.config import Config
from vpipe.config.machines import Hosts
from vpipe.distributed.environment import RankEnvironment
from vpipe.errors import UserError, counted
from vpipe.schedules.prepare import ScheduleSpec


def ranks_of(config: Config) -> int:
    """Return the ranks of the schedule.

    Raises:
        UserError: there is no such schedule.
    """
    parallel = config.parallel.standing_in
    return ScheduleSpec(parallel.schedule, parallel.model_parallel_size, config.training.num_microbatches,
                        parallel.update_every, parallel.placement, parallel.chunks,
                        replicas=1 if parallel.placement else parallel.data_parallel_size).prepare(proved=True).ranks


def hosts_of(config: Config) -> Hosts | None:
    """Return the hosts of ``machines``; None when all ranks are here.

    Raises:
        UserError: they are not as many as the ranks, or the first is not this host.
    """
    if config.machines is None:
        return None
    ranks = ranks_of(config)
    if len(config.machines) != ranks:
        raise UserError(f"machines lists {len(config.machines)}, but the schedule has {counted(ranks, 'rank')}",
                        hint="give one host:gpu per rank")
    hosts = Hosts.from_machines(config.machines)
    if hosts.logins[0] not in hosts.here:
        raise UserError(f"the first host of machines, '{hosts.name(0)}', is not this one ('{socket.gethostname()}')",
                        hint="start vpipe there, or begin the list with this host")
    return hosts


def check_gpus(config: Config, numbers: Iterable[int], started_by_others: bool = False) -> None:
    """Refuse to compute on GPUs where there is none, and backend nccl where a rank has none of its own.

    Nothing is refused where the config asks for neither: then ranks compute on the GPUs that there are.

    Args:
        numbers: of this host's ranks, or of those of them that this process is.
        started_by_others: the ranks, so that the numbers are not those of ``machines``.

    Raises:
        UserError: a GPU is missing, or two ranks want the same one.
    """
    named = config.machines is not None and config.parallel.device != "cpu" and not started_by_others
    if not config.parallel.asks_for_gpus and not named:
        return
    import torch

    from vpipe.distributed.device import Visible, choose_device

    gpus, numbers = torch.cuda.device_count(), list(numbers)
    if named and (missing := sorted({number for number in numbers if number >= gpus > 0})):
        raise UserError(f"machines names GPU {missing[0]}, but this host has {counted(gpus, 'GPU')}, counted from 0",
                        hint=f"write host:0{f' to host:{gpus - 1}' * (gpus > 1)}: ranks may share a GPU, if not under "
                        "nccl; device: cpu computes on the processor")
    if not config.parallel.asks_for_gpus:
        return
    chosen = [choose_device(config.parallel.device, config.parallel.backend, Visible(gpus, number)).index
              for number in numbers]
    if config.parallel.backend == "nccl" and len(set(chosen)) < len(chosen):
        what = f": {counted(len(chosen), 'rank')}, {counted(gpus, 'GPU')}" if gpus < len(chosen) else \
            f", but two ranks of a host are given the same: {chosen}"
        raise UserError(f"backend nccl needs a GPU per rank{what}", hint="set parallel.backend to gloo (in VPipe's "
                        "form, 'distributed_backend': 'gloo'), under which ranks may share a GPU, or leave it out")


def check_alone(command: str, environment: Mapping[str, str]) -> None:
    """Refuse to run once per process of torchrun or srun.

    Args:
        command: for the message.

    Raises:
        UserError: this is one of several processes.
    """
    # Where the first rank is does not matter here: an address at hand saves asking SLURM for it.
    member = RankEnvironment.parse({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", **environment})
    if member is not None and member.ranks > 1:
        raise UserError(f"{command} is one of {counted(member.ranks, 'process')} of {member.starter}, but it starts "
                        "its ranks itself", hint="run it alone, without torchrun or srun")
