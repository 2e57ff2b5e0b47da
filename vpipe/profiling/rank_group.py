"""Synchronise the ranks that measure together."""

from __future__ import annotations

import socket
from typing import Any

import torch

from vpipe import accelerator
from vpipe.distributed.init import exchange
from vpipe.profiling.device import usable_cores

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
        self._exchange = exchange(timeout_s=PATIENCE_S)
        self.rank, self.ranks = self._exchange.rank, self._exchange.ranks
        self.hosts: list[str] = self.all_gather(socket.gethostname())

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks (anything that JSON holds) on every rank. All must call it, and wait."""
        return self._exchange.all_gather(value)

    def barrier(self, doing: str = "measuring layers") -> None:
        """Wait for all, longer than the process group would: others may measure for longer than its timeout."""
        self._exchange.all_gather(None, doing)

    def cores(self) -> int | None:
        """Return how many ranks of a host can compute at once without slowing each other; None where each has a GPU.

        A host's ranks may each be bound to cores of their own: together they have all of these. Ranks that share GPUs
        are as many as these. The smallest number of any host counts.
        """
        gpu = accelerator.uuid_of(self._device) if self._device.type != "cpu" else None
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
