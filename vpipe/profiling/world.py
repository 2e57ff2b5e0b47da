"""The ranks that measure together."""

from __future__ import annotations

import json
import socket
from typing import Any

import torch
import torch.distributed as dist

from vpipe.runtime.distributed import share_tensors


class World:
    """All ranks of the process group, or this process alone where there is none.

    Attributes:
        rank: of this process.
        ranks: how many there are.
        hosts: the name of each rank's host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.ranks = dist.get_world_size() if joined else 1
        self.hosts: list[str] = self.share(socket.gethostname())

    def share(self, value: Any) -> list[Any]:
        """What each rank gives (anything that JSON holds), on every rank. All must call it, and wait here for all."""
        if self.ranks == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        shared = [share_tensors({"value": text} if rank == self.rank else {}, rank, self._device)
                  for rank in range(self.ranks)]
        return [json.loads(bytes(tensors["value"].numpy()).decode()) for tensors in shared]

    @property
    def ranks_per_host(self) -> int:
        """Of the host with most."""
        return max(self.hosts.count(host) for host in set(self.hosts))

    def turn(self, at_once: int | None) -> tuple[int, int]:
        """When this rank's turn is, and how many turns there are, if a host's ranks may work ``at_once`` only."""
        if at_once is None:
            return 0, 1
        place = self.hosts[:self.rank].count(self.hosts[self.rank])
        return place // at_once, -(-self.ranks_per_host // at_once)
