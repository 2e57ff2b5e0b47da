"""Derive the ranks of a config: how many, on which hosts and GPUs, with which command, environment and malloc."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from vpipe import Execution, accelerator
from vpipe.app.config.config import Config
from vpipe.app.config.formats import ADDITIONS
from vpipe.app.config.machines import Hosts, host_of
from vpipe.app.imports import IMPORTS, imported_files
from vpipe.app.launch.container import Container
from vpipe.app.launch.network import free_port, interface_towards
from vpipe.distributed import Host, RankEnvironment
from vpipe.errors import UserError, counted
from vpipe.runtime import prepare_schedule


def ranks_of(config: Config) -> int:
    """Return the number of processes: ranks of the schedule, each so many as split a layer.

    Raises:
        UserError: there is no such schedule.
    """
    cut = replace(config.parallel.standing_in.cut, recompute=0.0)  # it changes no rank
    return prepare_schedule(None, cut, config.order, config.microbatches, Execution(), needs_norms=False,
                            proved=True).ranks * config.parallel.tensor


def check_neighbours(config: Config, hosts: Sequence[str]) -> None:
    """Refuse ranks that split layers between hosts; ``hosts`` are those of all ranks."""
    parts = config.parallel.tensor
    for first in range(0, len(hosts), parts):
        if len(on := dict.fromkeys(hosts[first:first + parts])) > 1:
            raise UserError(f"ranks {first} to {first + parts - 1} split every layer (parallel.tensor is {parts}), but "
                            f"are on {len(on)} hosts: {', '.join(on)}", hint="give every host a multiple of "
                            f"{counted(parts, 'rank')}, with numbers that follow one another")


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
    check_neighbours(config, [hosts.name(rank) for rank in range(ranks)])
    if hosts.logins[0] not in hosts.here:
        raise UserError(f"the first host of machines, '{hosts.name(0)}', is not this one ('{socket.gethostname()}')",
                        hint="start vpipe there, or begin the list with this host")
    return hosts


def check_gpus(config: Config, numbers: Iterable[int], started_by_others: bool = False) -> None:
    """Refuse a config that asks for GPUs which this host lacks, or for nccl where a rank has no GPU of its own.

    Args:
        numbers: the GPU of each of this host's ranks, or of this rank.
        started_by_others: whether torchrun or srun started the ranks: then the numbers are not those of ``machines``.

    Raises:
        UserError: a GPU is missing, or two ranks want the same one.
    """
    named = config.machines is not None and config.parallel.device != "cpu" and not started_by_others
    if not config.parallel.asks_for_gpus and not named:
        return
    gpus, numbers = accelerator.count(), list(numbers)
    if named and (missing := sorted({number for number in numbers if number >= gpus > 0})):
        raise UserError(f"machines names GPU {missing[0]}, but this host has {counted(gpus, 'GPU')}, counted from 0",
                        hint=f"write host:0{f' to host:{gpus - 1}' * (gpus > 1)}: ranks may share a GPU, if not under "
                        "nccl; device: cpu computes on the processor")
    if not config.parallel.asks_for_gpus:
        return
    wanted, backend = config.parallel.device, config.parallel.backend
    chosen = [accelerator.choose(wanted, backend, accelerator.Visible(gpus, number)).index for number in numbers]
    if config.parallel.backend in accelerator.DIRECT and len(set(chosen)) < len(chosen):
        what = f": {counted(len(chosen), 'rank')}, {counted(gpus, 'GPU')}" if gpus < len(chosen) else \
            f", but two ranks of a host are given the same: {chosen}"
        raise UserError(f"backend {config.parallel.backend} needs a GPU per rank{what}", hint="set "
                        "parallel.backend to gloo (in VPipe's form, 'distributed_backend': 'gloo'), under which ranks "
                        "may share a GPU, or leave it out")


def check_alone(command: str) -> None:
    """Refuse to run ``command`` once per process of torchrun or srun."""
    # The address of rank 0 does not matter here: one at hand saves asking SLURM for it.
    rank = RankEnvironment.parse({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", **os.environ})
    if rank is not None and rank.ranks > 1:
        raise UserError(f"{command} is one of {counted(rank.ranks, 'process')} of {rank.starter}, but it starts "
                        "its ranks itself", hint="run it alone, without torchrun or srun")


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host, as its launcher starts them.

    Attributes:
        devices: rank -> the number of its GPU on this host, if it uses one.
        world: ranks on all hosts together.
        address, port: where rank 0 waits for the others.
        interface: the network interface between ranks; None leaves it to gloo and nccl.
        threads: of the CPU, per rank.
        task: what the ranks do; see :mod:`vpipe.app.launch.rank_main`.
        host: its name for messages; None when it is the only one.
        container: the image that ranks run in; None without one.
        interface_found: whether nobody chose the interface; then this process's environment may.
        run: what tells it from another run at the same port.
        secret: by which its ranks let each other in.
        meeting: the folder where they meet, if all are on this host; only this user may enter it.
        variables: more of their environment, of packages; not in a container, which has none of their files.
    """

    devices: Mapping[int, int]
    world: int
    address: str
    port: int
    interface: str | None
    threads: int
    task: Sequence[str] = ("train",)
    host: str | None = None
    container: Container | None = None
    interface_found: bool = False
    run: str = field(default_factory=lambda: token_hex(4))
    secret: str = field(default_factory=lambda: token_hex(16), repr=False)
    meeting: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def alone(cls, ranks: int, port: int, threads: int, task: Sequence[str] = ("train",),
              container: Container | None = None) -> HostRanks:
        """Return all ranks on this host, by its loopback, whatever its name resolves to."""
        return cls({rank: rank for rank in range(ranks)}, ranks, "127.0.0.1", port,
                   "lo" if sys.platform == "linux" else None, threads, task, container=container, interface_found=True)

    def command(self, folder: Path | str) -> list[str]:
        """Return what every rank runs; ``folder`` tells it the rest."""
        worker = ["-m", "vpipe.app.launch.rank_main", str(folder), *self.task]
        if self.container is None:
            return [sys.executable, *worker]
        read = [Path(word) for word in self.task if os.path.isabs(word)]  # the checkpoint to go on from
        met = [] if self.meeting is None else [Path(self.meeting)]
        return self.container.wrapped(["python3", *worker],
                                      bound=[Path(folder), *read, *met, *map(Path, imported_files())])

    def environment(self, rank: int) -> dict[str, str]:
        """Return what else is set for a rank, beside what this process has; torchrun's names, with ours."""
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(self.devices[rank]), "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port), "OMP_NUM_THREADS": str(self.threads),
            RankEnvironment.RUN: self.run, RankEnvironment.SECRET: self.secret,
            RankEnvironment.MEETING: self.meeting or ""}
        if IMPORTS in os.environ:
            variables[IMPORTS] = os.environ[IMPORTS]
        if self.interface is not None:
            variables |= interface_variables(self.interface, found=self.interface_found)
        if self.host is not None:
            variables[RankEnvironment.HOST] = self.host
        if self.container is not None:
            variables |= self.container.environment
        else:
            variables |= self.variables
        return variables


def ranks_here(config: Config, hosts: Hosts | None, ranks: int, *task: str) -> HostRanks:
    """Return the ranks of this host, which is the first, to do a ``task``.

    Raises:
        UserError: there is no container, the port is in use, or other hosts have no way to reach this one.
    """
    parallel = config.parallel
    here = HostRanks.alone(ranks, free_port(parallel.master_port), config.training.threads, task,
                           Container.from_config(config))
    address, interface = parallel.master_address or here.address, parallel.interface or here.interface
    if hosts is not None and hosts.others:
        address = parallel.master_address or Host(hosts.first).address_for([host_of(login) for login in hosts.others])
        interface = parallel.interface or interface_towards(address)
        here = replace(here, host=hosts.first)
    return replace(here, devices=here.devices if hosts is None else hosts.on(None), address=address,
                   interface=interface, interface_found=parallel.interface is None,
                   variables=variables_of_packages(config))


def variables_of_packages(config: Config) -> dict[str, str]:
    """Return the environment variables that packages set for the ranks of a config."""
    return {name: value for kind in ADDITIONS.added() for name, value in kind().rank_variables(config).items()}


def interface_variables(interface: str, *, found: bool) -> dict[str, str]:
    """Return what tells gloo and nccl the network interface; if nobody chose it, only what the environment lacks."""
    return {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            if not (found and name in os.environ)}


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of ``malloc.h``."""

NEVER, MOST_BYTES = -1, 32 << 20
"""Values of the two: the free end of the heap is never given back; only blocks above 32 MiB, the most that can be set,
are still mapped by themselves. To keep those, too (``M_MMAP_MAX`` 0), leaves holes in the heap: it made a rank with
logits of 64 MiB half as large again."""

TUNABLES = "GLIBC_TUNABLES"


def keep_memory_for(config: Config) -> None:
    """Let this process keep the memory that it frees, if its config says so; the log says what came of it."""
    if config.launch.keep_memory:
        logging.getLogger("vpipe").info(keep_memory())


def keep_memory(environment: Mapping[str, str] = os.environ) -> str:
    """Let this process keep the memory that it frees, if its C library is glibc and the environment does not tune
    malloc. Returns a line for the log.

    By default glibc gives a freed large block back to the system. The next tensor of the same size then costs a page
    fault for each of its pages, which the system fills with zeros. Source: mallopt(3).
    """
    tuned = sorted(name for name in environment if name.startswith("MALLOC_"))
    if "glibc.malloc." in environment.get(TUNABLES, ""):
        tuned.append(TUNABLES)
    if tuned:
        return f"malloc is left as {', '.join(tuned)} in the environment says"
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return "the C library is not glibc: malloc is left as it is"
    library.mallopt(M_MMAP_THRESHOLD, MOST_BYTES)
    library.mallopt(M_TRIM_THRESHOLD, NEVER)
    return "malloc keeps what is freed"
