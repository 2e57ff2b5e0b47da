"""The command, environment and memory settings of the ranks of one host."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from vpipe.config.config import Config
from vpipe.config.machines import Hosts, host_of
from vpipe.distributed.environment import HOST, RUN
from vpipe.distributed.network import interface_towards, meeting_address
from vpipe.launch.container import Container

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of ``malloc.h``."""

NEVER, MOST_BYTES = -1, 32 << 20
"""What is free at the end of the heap is never given back. Only blocks of more than this, the most that can be set, are
still mapped by themselves, and given back: to keep those, too (``M_MMAP_MAX`` 0), leaves holes in the heap, which the
next one does not fit once a smaller one was put there. It made a rank with logits of 64 MiB half as large again."""

TUNABLES = "GLIBC_TUNABLES"


@dataclass(frozen=True)
class HostRanks:
    """What one host's launcher must know to start its ranks.

    Attributes:
        devices: rank -> the number of its GPU on this host, if it uses one.
        world: ranks on all hosts together.
        address, port: where the first rank waits for the others.
        interface: the network interface between ranks; None leaves it to gloo and nccl.
        threads: of the CPU, per rank.
        task: what the ranks do; see :mod:`vpipe.launch.rank_main`.
        host: its name for messages; None when it is the only one.
        container: the image that ranks run in.
        python: that runs them without one.
        interface_found: whether nobody chose the interface; then this process's environment may.
        run: what tells it from another run at the same port.
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
    python: str = sys.executable
    interface_found: bool = False
    run: str = field(default_factory=lambda: token_hex(4))

    @classmethod
    def alone(cls, ranks: int, port: int, threads: int, task: Sequence[str] = ("train",), *,
              devices: Mapping[int, int] | None = None, container: Container | None = None,
              address: str | None = None, interface: str | None = None) -> HostRanks:
        """Return all ranks on this host; when no address and interface are chosen, by its loopback."""
        found = "lo" if sys.platform == "linux" else None  # whatever the name of this host resolves to
        return cls(devices or {rank: rank for rank in range(ranks)}, ranks, address or "127.0.0.1", port,
                   interface or found, threads, task, container=container, interface_found=interface is None)

    def command(self, folder: Path | str) -> list[str]:
        """Return what every rank runs; ``folder`` tells it the rest."""
        worker = ["-m", "vpipe.launch.rank_main", str(folder), *self.task]
        if self.container is None:
            return [self.python, *worker]
        read = [Path(word) for word in self.task if os.path.isabs(word)]  # the checkpoint to go on from
        return self.container.wrapped(["python3", *worker], bound=[Path(folder), *read])

    def environment(self, rank: int) -> dict[str, str]:
        """Return what is set for a rank, beside what this process has; torchrun's names, with ours."""
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(self.devices[rank]), "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port), "OMP_NUM_THREADS": str(self.threads),
            RUN: self.run}
        if self.interface is not None:
            variables |= {name: value for name, value in interface_variables(self.interface).items()
                          if not (self.interface_found and name in os.environ)}
        if self.host is not None:
            variables[HOST] = self.host
        if self.container is not None:
            variables |= self.container.environment
        return variables


def ranks_here(config: Config, hosts: Hosts | None, ranks: int, port: int) -> HostRanks:
    """Return the ranks of this host, which is the first.

    Raises:
        UserError: there is no container, or no way by which other hosts would reach this one.
    """
    container, threads, parallel = Container.from_config(config), config.training.threads, config.parallel
    if hosts is None or not hosts.others:
        devices = None if hosts is None else hosts.on(None)
        return HostRanks.alone(ranks, port, threads, devices=devices, container=container,
                               address=parallel.master_address, interface=parallel.interface)
    address = parallel.master_address or meeting_address(hosts.first, [host_of(login) for login in hosts.others])
    return HostRanks(hosts.on(None), ranks, address, port, parallel.interface or interface_towards(address), threads,
                     host=hosts.first, container=container, interface_found=parallel.interface is None)


def interface_variables(interface: str) -> dict[str, str]:
    """Return what tells gloo and nccl the network interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def keep_memory(environment: Mapping[str, str] = os.environ) -> str:
    """Let this process keep what it frees, if its C library is glibc and nobody has tuned that.

    By its defaults glibc takes a large block from the system and gives it back when it is freed. The next tensor of the
    same size then costs a page fault for each of its pages, which the system fills with zeros. Source: mallopt(3).

    Args:
        environment: that the process was started with; ``MALLOC_*`` or glibc's tunables for malloc in it go before.

    Returns:
        What was done, for the log.
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
