"""Small tensors of all ranks on rank 0, for which nobody waits."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.runtime.transport.broadcast import talking_with
from vpipe.runtime.transport.process_groups import control_group


class Gather:
    """Sends what this process has to rank 0; on rank 0, gets ready to receive it. All ranks make this object.

    Args:
        here: by rank of this process, a tensor of one shape on all ranks, in host memory.
        rank: of this process.
        ranks: how many there are.
        about: what the ranks do with each other, for messages.
    """

    def __init__(self, here: Mapping[int, Tensor], rank: int, ranks: int, about: str) -> None:
        self._tensors, self._about = dict(here), about
        self._work: dict[int, dist.Work] = {}
        if len(here) == ranks:
            return  # all are in this process
        for peer in range(1, ranks) if rank == 0 else [0]:
            with talking_with(peer, about):
                if rank:
                    work = dist.isend(here[rank], peer, control_group())
                else:
                    self._tensors[peer] = torch.empty_like(here[0])
                    work = dist.irecv(self._tensors[peer], peer, control_group())
            assert work is not None, "this rank is in the group"
            self._work[peer] = work

    def finish(self, timeout_s: float) -> dict[int, Tensor]:
        """Wait until what is under way has arrived; the tensors by rank: of all on rank 0, else of this process.

        Raises:
            RunError: a rank is gone, or did not send in time.
        """
        for peer, work in self._work.items():
            with talking_with(peer, self._about):
                work.wait(timedelta(seconds=timeout_s))
        self._work.clear()
        return dict(sorted(self._tensors.items()))
