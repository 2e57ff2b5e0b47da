"""Measure how fast tensors get from rank to rank, by the transport of a run, and how fast a rank's device is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.description.transfers import Transfers
from vpipe.plan.profile import LinkProfile
from vpipe.profiling.layer_timer import summary
from vpipe.profiling.rank_group import RankGroup
from vpipe.runtime.transport.process_group import DistributedTransport, transport_class
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind
from vpipe.torch_private import foreach_copy_

SIZES = (1 << 10, 1 << 17, 1 << 20, 1 << 22)
"""Bytes of the tensors that are exchanged."""

TIMES = 7

_BYTES, _PARTS = 32 << 20, 8
"""Of the weights that are copied and added, and how many tensors they are."""


def measure_links(group: RankGroup, device: torch.device,
                  transfers: Transfers) -> tuple[LinkProfile, dict[tuple[int, int], LinkProfile]]:
    """Return the link between two ranks of one host, and those between certain ranks, by (source, target).

    Ranks are the pipeline's. Processes that split its layers all exchange with their counterparts at the same time.
    Neighbours send a tensor back and forth; half of that is a transfer. On a processor one pair of a host does so at a
    time, because a transfer takes both ranks' cores, and a simulation adds what else needs them. On GPUs all pairs do
    that can at the same time. Ranks of different hosts that are no neighbours get the median of those that are. Alone,
    tensors are handed over in memory.
    """
    if (ranks := len(group.hosts)) == 1:
        return LinkProfile(0.0, copied_bytes_per_s(device)), {}
    rounds = _rounds(ranks, range(ranks) if device.type != "cpu" else group.hosts)
    transport = transport_class(transfers, device)(device, transfers.timeout_s, 1, lambda rank: f"rank {rank}", 1)
    mine: dict[int, list[list[float]]] = {}
    for pairs in rounds:
        group.all_gather(None)
        for first, second in pairs:
            if group.place in (first, second):
                peer = second if group.place == first else first
                process = group.rank + (peer - group.place) * group.tensor
                numbers = count()
                mine[peer] = [_back_and_forth(transport, process, size, numbers, device) for size in SIZES]
    group.all_gather(None)
    transport.finish()
    # What the peer sent is what was waited for: the link is towards this rank.
    pooled: dict[tuple[int, int], list[list[float]]] = defaultdict(lambda: [[] for _ in SIZES])
    for process, theirs in enumerate(group.all_gather([[peer, times] for peer, times in mine.items()])):
        for peer, times in theirs:
            for all_lanes, own in zip(pooled[peer, process // group.tensor], times, strict=True):
                all_lanes += own
    found = {ends: _fitted(times) for ends, times in pooled.items()}
    near = [link for (a, b), link in found.items() if group.hosts[a] == group.hosts[b]]
    far = [link for (a, b), link in found.items() if group.hosts[a] != group.hosts[b]]
    if far:
        others = {(a, b): _typical(far) for a in range(ranks) for b in range(ranks) if group.hosts[a] != group.hosts[b]}
        found = others | found
    return _typical(near or far), found


def _rounds(ranks: int, shared: Sequence[object]) -> list[list[tuple[int, int]]]:
    """Return neighbours on a ring, in rounds in which no rank's resource among ``shared`` is needed twice."""
    pairs = [(rank, rank + 1) for rank in range(ranks - 1)] + ([(0, ranks - 1)] if ranks > 2 else [])
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        for others in rounds:
            if not {shared[rank] for other in others for rank in other} & {shared[rank] for rank in pair}:
                others.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def _back_and_forth(transport: DistributedTransport, peer: int, size: int, numbers: count[int],
                    device: torch.device) -> list[float]:
    """Return the seconds of transfers of so many bytes: half of the way to the peer and back."""
    tensor = torch.ones(size // 4, device=device)
    specs, seconds = [TensorSpec.from_tensor(tensor)], []
    for again in range(TIMES + 2):
        key = TransferKey(TransferKind.ACTIVATIONS, max(peer, transport.rank), next(numbers))
        first = transport.rank < peer
        if not first:
            transport.post(peer, key, specs)
        started = perf_counter()
        if first:  # its receive comes second, as the peer's send does
            transport.send(peer, key, [tensor])
            transport.post(peer, key, specs)
        received = transport.receive(peer, key)
        if not first:
            transport.send(peer, key, received)
        accelerator.synchronize(device)
        if again > 1:  # connections are made at first, and a pair that meets early waits once
            seconds.append((perf_counter() - started) / 2)
    return seconds


def _fitted(times: Sequence[Sequence[float]]) -> LinkProfile:
    """Return latency and speed from the median times: the smallest size gives the latency, the largest the speed."""
    latency = median(times[0])
    largest = median(times[-1])
    speed = (SIZES[-1] - SIZES[0]) / max(largest - latency, 1e-9)
    return LinkProfile(latency, speed, summary(times[-1]).spread)


def _typical(links: Sequence[LinkProfile]) -> LinkProfile:
    return LinkProfile(median(link.latency_s for link in links), median(link.bytes_per_s for link in links),
                       median(link.spread for link in links))


def matrix_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of a product of two square matrices: operations per second of one rank."""
    size = 1024 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / min(_seconds(lambda: a @ a, device))


def copied_bytes_per_s(device: torch.device) -> float:
    """Return the rate of copying weights into memory that is there already, as for a further version of them."""
    source, target = _weights(device), _weights(device)
    return _BYTES / median(_seconds(lambda: foreach_copy_(target, source), device))


def added_bytes_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of adding a gradient of weights to the accumulated one: bytes of the gradient per second."""
    source, target = _weights(device, dtype), _weights(device, dtype)

    def add() -> None:
        for total, gradient in zip(target, source, strict=True):
            total.add_(gradient)

    return _BYTES / median(_seconds(add, device))


def _weights(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(_BYTES // _PARTS // dtype.itemsize, device=device, dtype=dtype) for _ in range(_PARTS)]


def _seconds(work: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of four calls, after one that does not count."""
    clock, seconds = accelerator.clock_of(device), []
    for _ in range(5):
        started = clock()
        work()
        seconds.append(clock() - started)
    return seconds[1:]
