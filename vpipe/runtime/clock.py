"""By how much the clocks of the ranks differ, so that what they note can be put on one scale."""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from vpipe.runtime.process_groups import control_group
from vpipe.runtime.talk import talking_with

ROUND_TRIPS = 40


def clock_offset() -> float:
    """What to add to this process's ``perf_counter`` to have that of rank 0. All ranks must call it.

    Rank 0 tells its time in answer to each rank in turn; the quickest of some round trips counts, as if both ways took
    equally long (Cristian, Probabilistic clock synchronization, 1989). Wrong by half of that round trip at most.

    Raises:
        RunError: a rank did not answer in the process group's time, or is gone.
    """
    rank = dist.get_rank()
    time_s, group = torch.zeros(1, dtype=torch.float64), control_group()
    if rank == 0:
        for peer in range(1, dist.get_world_size()):
            with talking_with(peer, "comparing clocks"):
                for _ in range(ROUND_TRIPS):
                    dist.recv(time_s, peer, group)
                    dist.send(time_s.fill_(perf_counter()), peer, group)
        return 0.0
    found = []
    with talking_with(0, "comparing clocks"):
        for _ in range(ROUND_TRIPS):
            asked_s = perf_counter()
            dist.send(time_s, 0, group)
            dist.recv(time_s, 0, group)
            theirs_s = time_s.item()
            answered_s = perf_counter()
            found.append((answered_s - asked_s, theirs_s - (asked_s + answered_s) / 2))
    return min(found)[1]
