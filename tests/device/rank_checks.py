"""Jobs for a test world whose ranks compute on the late device (rank_with_late.py)."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jobs
import late_device
import late_nccl
import torch
import torch.distributed as dist
import waits
from models import rich_batches
from torch import Tensor
from torch.nn import functional as F

SIZE = 512

late: Any = torch.get_device_module("late") if late_device._libraries else None


@contextmanager
def without_dropout() -> Iterator[None]:
    """Each device draws its own random numbers."""
    dropout = F.dropout
    F.dropout = lambda given, *_: given  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout = dropout


def carried_by(rules: Mapping[str, bool] | None) -> AbstractContextManager[Any]:
    """Return the context in which tensors go by rules of nccl, or else over gloo, by way of the host."""
    return nullcontext() if rules is None else late_nccl.late_rules(**rules)


def under(*, run: str, rules: Mapping[str, bool] | None, seed: int, **arguments: Any) -> Any:
    """What a job, ``module.function``, returns."""
    module, _, function = run.rpartition(".")
    late.configure(seed, patience_ms=5)
    with without_dropout(), carried_by(rules) as carried:
        returned = getattr(importlib.import_module(module), function)(**arguments)
        assert rules is None or carried.communicators
    return returned


def without_a_wait(*, place: str, **arguments: Any) -> Any:
    """What :func:`under` returns where the wait at a place is taken away."""
    with waits.without(place):
        return under(**arguments)


def ended(*, place: str | None, **arguments: Any) -> bool:
    """Whether the device has done all, sends too, when the batches have ended: the process may end then."""
    late.configure(1, patience_ms=500)  # longer than a rank waits for a processor
    with nullcontext() if place is None else waits.without(place), late_nccl.late_rules(eager=False, buffered=False):
        list(jobs.pipeline(jobs.MODELS["rich"](), **arguments).train(rich_batches(2, 8)))
        return bool(late.current_stream().query())


# -- transfers that are wrong, and mended, between the ranks of a pair -------------------------------------------------

def full(value: float) -> Tensor:
    return torch.full((SIZE,), float(value), device=torch.accelerator.current_accelerator())


def waited_for(work: Any, mended: bool) -> None:
    if mended:
        work.wait()


def received_too_early(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A tensor is read before its receive is waited for."""
    tensor = full(3)
    if sends:
        late.busy()
        dist.isend(tensor + 1, peer, group).wait()
        return True
    waited_for(dist.irecv(tensor, peer, group), mended)
    return bool((tensor.sum() == 4 * SIZE).item())


def sent_and_overwritten(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A tensor is changed before its send is waited for."""
    tensor = full(3)
    if sends:
        waited_for(dist.isend(tensor, peer, group), mended)
        tensor.fill_(7)
        return True
    late.busy()
    dist.irecv(tensor, peer, group).wait()
    return bool((tensor.sum() == 3 * SIZE).item())


def sent_and_freed(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A tensor is freed before its send is waited for: the next takes its memory."""
    tensor = full(3)
    if sends:
        waited_for(dist.isend(tensor, peer, group), mended)
        del tensor
        full(7)
        return True
    late.busy()
    dist.irecv(tensor, peer, group).wait()
    return bool((tensor.sum() == 3 * SIZE).item())


def received_into_what_another_stream_reads(sends: bool, peer: int, group: Any, mended: bool) -> bool:
    """A receive is posted into a tensor that another stream still reads."""
    tensor = full(3)
    if sends:
        dist.isend(tensor + 1, peer, group).wait()
        return True
    side, current = late.Stream(), late.current_stream()
    side.wait_stream(current)
    with late.stream(side):
        late.busy()
        total = tensor.sum()
    if mended:
        current.wait_stream(side)
    dist.irecv(tensor, peer, group).wait()
    current.wait_stream(side)
    return bool((total == 3 * SIZE).item())


WRONG = (received_too_early, sent_and_overwritten, sent_and_freed, received_into_what_another_stream_reads)


def tried(*, wrong: str, rules: Mapping[str, bool], mended: bool, seeds: int) -> list[bool]:
    """Whether it was right, of each seed."""
    results = []
    with late_nccl.late_rules(**rules):
        group, rank = dist.new_group(backend=late_nccl.LateRules.NAME), dist.get_rank()
        for seed in range(seeds):
            late.configure(seed, patience_ms=500)  # longer than a rank waits for a processor
            results.append(globals()[wrong](rank % 2 == 0, rank ^ 1, group, mended))
            late.synchronize()
            dist.monitored_barrier()
    return results


def order_of_a_pair(*, rules: Mapping[str, bool]) -> list[Any]:
    """Tags are ignored; the host waits for nothing but the result."""
    with late_nccl.late_rules(**rules):
        group, rank = dist.new_group(backend=late_nccl.LateRules.NAME), dist.get_rank()
        late.configure(1, patience_ms=500)
        tensors, works = [full(value + 10 * (rank % 2)) for value in range(4)], []
        for tag, tensor in enumerate(tensors):
            if (tag + rank) % 2:
                works.append(dist.irecv(tensor, rank ^ 1, group, tag=9 - tag))
            else:
                works.append(dist.isend(tensor, rank ^ 1, group, tag=tag))
        for work in works:
            work.wait()
        waits = late.host_waits()
        return [[tensor[0].item() for tensor in tensors], waits]


if __name__ == "__main__":  # in one process, the same device
    HERE = Path(__file__).parent
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "runtime")]
    torch.set_num_threads(1)
    late = late_device.load()
    print(json.dumps(under(**json.loads(sys.argv[1]))))
