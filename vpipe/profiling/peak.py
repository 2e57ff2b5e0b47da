"""What the devices of a run compute at most: what MFU is a share of."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter, thread_time

import torch

from vpipe.distributed.device import device_name, gpu_uuid
from vpipe.profiling.device import clock_of
from vpipe.profiling.gpus import known_tflops
from vpipe.profiling.world import World

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What products are computed in, by the kind of arithmetic."""

ROUNDS, ROUND_S = 3, 0.04
"""All ranks multiply for so long at the same time, and the best of so many times counts."""

_SIZES = (256, 512, 1024, 2048, 4096)
_SHORT_S = 0.002
"""A product that takes less is too small to show what the device can do."""


@dataclass(frozen=True)
class Peak:
    """Of a run.

    Attributes:
        tflops: of one device, in 10^12 operations per second; where they were measured, the mean.
        devices: how many: ranks, but a GPU that several ranks share counts once.
        kind: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        source: where the number is from, for people.
    """

    tflops: float
    devices: int
    kind: str
    source: str

    @property
    def flops_per_s(self) -> float:
        """Of all devices together."""
        return 1e12 * self.tflops * self.devices

    def __str__(self) -> str:
        several = "" if self.devices == 1 else f"{self.devices} x "
        return f"{several}{self.tflops:,.4g} TFLOP/s {self.kind}, {self.source}"


def peak_of(world: World, device: torch.device, dtype: torch.dtype, given_tflops: float | None) -> Peak:
    """What the user says, else what the table of GPUs does, else what a product of matrices reaches now.

    Every rank of the world calls this, since what they measure they measure at the same time: they slow each other as
    they do in training. It takes less than half a second.

    Args:
        dtype: that the model computes in.
        given_tflops: of one device; None where the user does not say.
    """
    kind = _kind(dtype, device)
    names = world.share(_identity(device))
    devices = world.ranks if device.type == "cpu" else len({tuple(name) for name in names})
    if given_tflops is not None:
        return Peak(given_tflops, devices, kind, "as metrics.peak_tflops says")
    known = known_tflops(device_name(device), kind) if device.type == "cuda" else None
    if min(world.share(known or 0.0)):  # of every rank's GPU; where one is not known, all are measured
        assert known is not None, "it is the least of all"
        same = len(set(world.share(known))) == 1
        if same:
            return Peak(known, devices, kind, f"the data sheet of {device_name(device)}")
    return Peak(_measured(world, device, DTYPES[kind]) / devices / 1e12, devices, kind, "measured")


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return next(kind for kind, other in DTYPES.items() if other == dtype)


def _identity(device: torch.device) -> list[str]:
    """What a GPU can be told from others by; nothing for a processor."""
    return [gpu_uuid(device)] if device.type == "cuda" else []


def _measured(world: World, device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of all ranks together, in the best round.

    Of ranks with one thread their own time counts, so that it does not matter what else the host does meanwhile; ranks
    that are more than their host's cores get their share of these.
    """
    work, size = _product(device, dtype)
    clock, best = clock_of(device), 0.0
    for _ in range(ROUNDS):
        world.share(None)  # so that all begin together
        started, products = clock(), 0
        while (seconds := clock() - started) < ROUND_S or not products:
            work()
            products += 1
        best = max(best, sum(world.share(2.0 * size**3 * products / seconds)))
    at_once = world.cores() if clock is thread_time else None
    return best if at_once is None else best * min(1.0, at_once / world.ranks_per_host)


def _product(device: torch.device, dtype: torch.dtype) -> tuple[_Product, int]:
    """A product of square matrices that is large enough, warm, and their size."""
    for size in _SIZES:
        work = _Product(device, dtype, size)
        work()
        started = perf_counter()
        work()
        if perf_counter() - started > _SHORT_S:
            break
    return work, size


class _Product:

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int) -> None:
        self._device = device
        self._a, self._b, self._out = (torch.full((size, size), 0.5, device=device, dtype=dtype) for _ in range(3))

    def __call__(self) -> None:
        """As a layer multiplies with its weights; returns when it is computed."""
        torch.mm(self._a, self._b.t(), out=self._out)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
