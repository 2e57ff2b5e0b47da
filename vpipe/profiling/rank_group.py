"""Synchronise the ranks that measure together."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vpipe.distributed.device import gpu_uuid
from vpipe.profiling.device import usable_cores
from vpipe.runtime.collectives import broadcast_value
from vpipe.runtime.transport.distributed import PeerTransfer, control_group

PATIENCE_S = 3600.0
"""Time that ranks wait for others that measure; one that is gone is noticed at once all the same."""


class RankGroup:
    """All ranks of the process group, or this process alone where there is none.

    Attributes:
        rank: of this process.
        ranks: their number.
        hosts: the name of each rank's host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.ranks = dist.get_world_size() if joined else 1
        self.hosts: list[str] = self.all_gather(socket.gethostname())

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks (anything that JSON holds) on every rank. All must call it, and wait."""
        return [broadcast_value(value, rank) for rank in range(self.ranks)]

    def barrier(self, doing: str = "measuring layers") -> None:
        """Wait for all, longer than the process group would: others may measure for longer than its timeout."""
        if self.ranks == 1:
            return
        token, patience = torch.zeros(1), timedelta(seconds=PATIENCE_S)
        others = range(1, self.ranks) if self.rank == 0 else (0,)
        ways = (dist.irecv, dist.isend) if self.rank == 0 else (dist.isend, dist.irecv)
        for way in ways:
            for peer in others:
                with PeerTransfer(peer, doing):
                    work = way(token, peer, control_group())
                    assert work is not None, "this rank is in the default group"
                    work.wait(patience)

    def cores(self) -> int | None:
        """Return how many ranks of a host can compute at once without slowing each other; None where each has a GPU.

        A host's ranks may each be bound to cores of their own: together they have all of these. Ranks that share GPUs
        are as many as these. The smallest number of any host counts.
        """
        gpu = gpu_uuid(self._device) if self._device.type == "cuda" else None
        shared = self.all_gather([gpu, usable_cores(), torch.get_num_threads()])
        gpus = [theirs for theirs, _, _ in shared]
        if None not in gpus and len(set(gpus)) == self.ranks:
            return None
        at_once: list[int] = []
        for host in set(self.hosts):
            here = [theirs for theirs, of in zip(shared, self.hosts, strict=True) if of == host]
            at_once.append(len({gpu for gpu, _, _ in here} - {None}) or
                           len({core for _, cores, _ in here for core in cores}) // max(one[2] for one in here))
        return max(1, min(at_once))

    @property
    def ranks_per_host(self) -> int:
        """Return the number of ranks on the host with most."""
        return max(self.hosts.count(host) for host in set(self.hosts))

    def turn(self, at_once: int | None) -> tuple[int, int]:
        """Return this rank's turn, and the number of turns, if only ``at_once`` ranks of a host may work."""
        if at_once is None:
            return 0, 1
        place = self.hosts[:self.rank].count(self.hosts[self.rank])
        return place // at_once, -(-self.ranks_per_host // at_once)
