"""Read a rank's device: its cores, the memory that ranks share, and the speed of its products and copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from vpipe import accelerator


def usable_cores() -> list[int]:
    """Return the numbers of the host's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shared_bytes(device: torch.device, cores: int | None) -> int:
    """Return the memory that the ranks of a host share; where ``cores`` is None, each has a GPU, that of this one."""
    return accelerator.total_bytes(device) * (1 if device.type == "cpu" else cores or 1)


def matrix_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of a product of two square matrices: operations per second of one rank."""
    size = 1024 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / min(_seconds(lambda: a @ a, device))


def copied_bytes_per_s(device: torch.device) -> float:
    """Return the rate of copying weights into memory that is there already, as for a further version of them."""
    source, target = _weights(device), _weights(device)
    return _BYTES / median(_seconds(lambda: torch._foreach_copy_(target, source), device))


def added_bytes_per_s(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the rate of adding a gradient of weights to the accumulated one: bytes of the gradient per second."""
    source, target = _weights(device, dtype), _weights(device, dtype)

    def add() -> None:
        for total, gradient in zip(target, source, strict=True):
            total.add_(gradient)

    return _BYTES / median(_seconds(add, device))


_BYTES, _PARTS = 32 << 20, 8


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
