"""Synchronise the ranks that measure together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.description.transfers import Transfers
from vpipe.distributed.init import exchange
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import UserError, counted
from vpipe.model.model import Model
from vpipe.model.structure import code_digest, structure
from vpipe.plan.profile import Identity
from vpipe.plugins import PluginGroup

PATIENCE_S = 3600.0
"""Time that ranks wait for others that measure; one that is gone is noticed at once all the same."""


class RankGroup:
    """All ranks of the process group, or this process alone where there is none.

    Where layers are split, a rank of the pipeline is several neighbouring processes, which do the same at once.

    Args:
        tensor: how many processes split every layer.

    Attributes:
        rank: of this process.
        ranks: the number of processes.
        hosts: the name of the host of each rank of the pipeline.
        device: of this rank, with its number: the current one where none was named.
    """

    def __init__(self, device: torch.device | str, tensor: int = 1) -> None:
        named = torch.device(device)
        self.device = named if named.type == "cpu" or named.index is not None else accelerator.current()
        self._exchange = exchange(timeout_s=PATIENCE_S)
        self.rank, self.ranks, self.tensor = self._exchange.rank, self._exchange.ranks, tensor
        if self.ranks % tensor:
            raise UserError(f"{counted(self.ranks, 'process')} cannot split layers over {tensor} each",
                            hint="start a multiple of as many")
        self.hosts: list[str] = self.all_gather(socket.gethostname())[::tensor]

    @staticmethod
    def supposed(device: torch.device, ranks: int, hosts: int = 1, tensor: int = 1) -> RankGroup:
        """Return the group of so many ranks of a pipeline on each of so many hosts like this one, without asking any.
        """
        return _SupposedGroup(device, ranks, hosts, tensor)

    @property
    def place(self) -> int:
        """The rank of the pipeline that this process is, or is a part of."""
        return self.rank // self.tensor

    def identify(self, model: Model, microbatches: Sequence[Mapping[str, Tensor]], *, model_name: str, optimizer: str,
                 backend: str | None = None, shared_memory: bool = True, threads: int | None = None,
                 precision: str = "fp32") -> list[Identity]:
        """Return the identities of the profiles that these ranks would measure here and now. All must call it.

        The layers are inspected once.

        Args:
            microbatches: one for each profile; they differ in the number of samples.
            model_name: family and size, for people.
            optimizer: its name, and its settings that cost time or memory.
            backend: that the user named, if any.
            shared_memory: whether the run's ranks of one host may use it.
            threads: per rank; those of this process when left out.
        """
        device, cores, threads = self.device, self.cores(), threads or torch.get_num_threads()
        carried = Transfers(backend, shared_memory=shared_memory).transport
        if backend is None:
            backend = accelerator.collectives() if device.type != "cpu" and cores is None else "gloo"
        if device.type == "cpu":
            backend += " and shared memory" * (carried == "shared_memory")
            cores = cores or self._ranks_of(len(usable_cores()) // threads)
        structures = [structure(layer) for layer in model.layers]
        first = Identity(
            model=model.digest(microbatches[0], structures), model_name=model_name, layers=len(model),
            microbatch_size=0, optimizer=optimizer, device=accelerator.name_of(device), threads=threads,
            ranks_per_host=self.ranks_per_host, backend=backend, torch=str(torch.__version__), ranks=self.ranks,
            hosts=len(set(self.hosts)), cores=cores, device_bytes=shared_bytes(device, self.at_once()),
            vpipe=PluginGroup.versions_of(["vpipe"]).get("vpipe", ""), code=code_digest(model.layers, structures),
            precision=precision, tensor=self.tensor, structure=model.digest({}, structures))
        return [replace(first, microbatch_size=len(microbatch[model.batch[0]]) if model.batch else 0)
                for microbatch in microbatches]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks (anything that JSON holds) on every rank. All must call it, and wait."""
        return self._exchange.all_gather(value)

    def barrier(self, doing: str = "measuring layers") -> None:
        """Wait for all, longer than the process group would: others may measure for longer than its timeout."""
        self._exchange.all_gather(None, doing)

    def cores(self) -> int | None:
        """Return how many ranks of the pipeline can compute at once on a host; None where each process has a GPU."""
        at_once = self.at_once()
        return None if at_once is None else self._ranks_of(at_once)

    def _ranks_of(self, processes: int) -> int:
        """Return how many ranks of the pipeline so many processes of a host are that can compute at once.

        Those that split layers wait for one another, and leave their cores to other ranks. So all ranks are measured at
        once there, and the times say how much they slow each other.
        """
        return max(1, processes) if self.tensor == 1 else max(processes // self.tensor, self.ranks_per_host)

    def at_once(self) -> int | None:
        """Return how many processes of a host can compute at once without slowing each other; None where each has a
        GPU.

        Those of a host may each be bound to cores of their own: together they have all of these. Those that share GPUs
        are as many as these. The smallest number of any host counts.
        """
        gpu = accelerator.uuid_of(self.device) if self.device.type != "cpu" else None
        shared = self.all_gather([gpu, usable_cores(), torch.get_num_threads()])
        gpus = [theirs for theirs, _, _ in shared]
        if None not in gpus and len(set(gpus)) == self.ranks:
            return None
        at_once: list[int] = []
        for host in set(self.hosts):
            here = [theirs for number, theirs in enumerate(shared) if self.hosts[number // self.tensor] == host]
            at_once.append(len({gpu for gpu, _, _ in here} - {None}) or
                           len({core for _, cores, _ in here for core in cores}) // max(one[2] for one in here))
        return max(1, min(at_once))

    @property
    def ranks_per_host(self) -> int:
        """Return the number of ranks of the pipeline on the host with most."""
        return max(self.hosts.count(host) for host in set(self.hosts))

    def turn(self, at_once: int | None) -> tuple[int, int]:
        """Return this rank's turn, and the number of turns, if only ``at_once`` of the pipeline's on a host may work.
        """
        if at_once is None:
            return 0, 1
        before = self.hosts[:self.place].count(self.hosts[self.place])
        return before // at_once, -(-self.ranks_per_host // at_once)


class _SupposedGroup(RankGroup):
    """Ranks of which none is there."""

    def __init__(self, device: torch.device, ranks: int, hosts: int, tensor: int) -> None:
        self.device, self._exchange, self.rank, self.tensor = device, Exchange(), 0, tensor
        self.hosts = [f"host {number // ranks}" for number in range(ranks * hosts)]
        self.ranks = len(self.hosts) * tensor

    def at_once(self) -> None:
        """Return None: each has a GPU, or computes on the cores of a host like this one."""


def usable_cores() -> list[int]:
    """Return the numbers of the host's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shared_bytes(device: torch.device, cores: int | None) -> int:
    """Return the memory that the ranks of a host share; where ``cores`` is None, each has a GPU, that of this one."""
    return accelerator.total_bytes(device) * (1 if device.type == "cpu" else cores or 1)
