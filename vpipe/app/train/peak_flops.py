"""Find the peak operations per second of a run's devices, which MFU is a share of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.profiling import RankGroup


@dataclass(frozen=True)
class Gpu:
    """A line of the table, in TFLOP/s of products of dense matrices."""

    # of the driver, without NVIDIA before it, as a regular expression for all of it. A part of a GPU (MIG) and a
    # laptop's have names of their own, and are not in the table.
    name: str
    fp32: float | None  # products in fp32
    tf32: float | None  # the same with TF32 allowed; None where the GPU has none
    bf16: float | None  # as fp16, with sums in fp32, as training needs them; None where the data sheet has none
    fp16: float | None
    source: str  # the manufacturer's document


GPUS = (
    Gpu("B200", 75.0, 1100.0, 2250.0, 2250.0, "data sheet HGX B200, which counts sparse products: halved"),
    Gpu("H200", 66.9, 494.7, 989.4, 989.4, "as H100 SXM5, whose chip it has"),
    Gpu("H200 NVL", None, None, 835.5, 835.5, "data sheet H200, which counts sparse products: halved"),
    Gpu("H100 80GB HBM3", 66.9, 494.7, 989.4, 989.4, "white paper H100: SXM5"),
    Gpu("H100 PCIe", 51.2, 378.0, 756.0, 756.0, "white paper H100: PCIe"),
    Gpu("H100 NVL", None, None, 835.5, 835.5, "data sheet H100, which counts sparse products: halved"),
    Gpu(r"A100-SXM4-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe", 19.5, 156.0, 312.0, 312.0, "white paper A100"),
    Gpu("A40", 37.4, 74.8, 149.7, 149.7, "data sheet A40"),
    Gpu("A30", None, None, 165.0, 165.0, "data sheet A30"),
    Gpu("A10", 31.2, 62.5, 125.0, 125.0, "data sheet A10"),
    Gpu("GeForce RTX 3090", 35.6, 35.6, 71.0, 71.0, "white paper GA102"),
    Gpu("GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2, "white paper Ada"),
    Gpu("RTX 6000 Ada Generation", 91.1, 182.1, 364.2, 364.2, "data sheet RTX 6000 Ada, which counts sparse products: "
                                                              "halved"),
    Gpu("L40S", 91.6, 183.0, 362.0, 362.0, "data sheet L40S"),
    Gpu("L4", 30.3, 60.0, 121.0, 121.0, "data sheet L4, which counts sparse products: halved"),
    Gpu(r"Tesla V100-SXM2-(16|32)GB", 15.7, None, None, 125.0, "data sheet V100: SXM2"),
    Gpu(r"Tesla V100-PCIE-(16|32)GB", 14.0, None, None, 112.0, "data sheet V100: PCIe"),
    Gpu("Tesla T4", 8.1, None, None, 65.0, "data sheet T4"))
"""GPUs in NVIDIA's publications. Others are measured."""


def known_tflops(name: str, kind: str) -> float | None:
    """Return the peak of one GPU; None where the table does not have it.

    Args:
        name: as :func:`vpipe.accelerator.name_of` returns it.
        kind: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    """
    gpu = next((gpu for gpu in GPUS if re.fullmatch(gpu.name, name.removeprefix("NVIDIA "))), None)
    found: float | None = getattr(gpu, kind, None)
    return found


KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Kind of arithmetic by the dtype of products; ``tf32`` where the device multiplies fp32 so."""

ROUNDS, ROUND_S = 3, 0.04
"""Rounds of which the best counts, and the seconds for which all ranks multiply at the same time in each."""

_SIZES = (256, 512, 1024, 2048, 4096)
_SHORT_S = 0.002
"""Shortest product that shows what the device can do."""


@dataclass(frozen=True)
class PeakFlops:
    """The peak of a run's devices."""

    tflops: float  # of one device, in 10^12 operations per second; where they were measured, the mean
    devices: int  # number of ranks, but a GPU that several ranks share counts once
    kind: str  # fp32, tf32, bf16 or fp16
    source: str  # of the number, for people

    def __str__(self) -> str:
        several = "" if self.devices == 1 else f"{self.devices} devices x "
        return f"{several}{self.tflops:,.4g} TFLOP/s {self.kind}, {self.source}"


def find_peak(device: torch.device, dtype: torch.dtype, given_tflops: float | None) -> PeakFlops:
    """Return the user's number, else that of the table of GPUs, else the rate of a matrix product measured now.

    Every rank calls this: they measure at the same time, because they slow each other as they do in training. It takes
    less than half a second.

    Args:
        device: of this rank.
        dtype: that the model computes in.
        given_tflops: of one device; None where the user gives none.
    """
    kind = "tf32" if dtype == torch.float32 and accelerator.multiplies_in_tf32(device) else KINDS[dtype]
    group = RankGroup(device)
    devices, sheet = group.ranks, None
    if device.type != "cpu":
        known = known_tflops(accelerator.name_of(device), kind)
        gpus = group.all_gather([accelerator.uuid_of(device), known])
        devices, sheet = len({gpu for gpu, _ in gpus}), known if {peak for _, peak in gpus} == {known} else None
    if given_tflops is not None:
        return PeakFlops(given_tflops, devices, kind, "as metrics.peak_tflops says")
    if sheet is not None:
        return PeakFlops(sheet, devices, kind, f"the data sheet of {accelerator.name_of(device)}")
    return PeakFlops(_measured(group, device, dtype) / devices / 1e12, devices, kind, "measured")


def _measured(group: RankGroup, device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of all ranks together, in the best round.

    Of ranks with one thread their own time counts, so that other work of the host does not matter; ranks
    that are more than their host's cores get their share of these.
    """
    work, size = _product(device, dtype)
    clock, best = accelerator.clock_of(device), 0.0
    for _ in range(ROUNDS):
        group.all_gather(None)  # so that all begin together
        started, products = clock(), 0
        while (seconds := clock() - started) < ROUND_S or not products:
            work()
            products += 1
        best = max(best, sum(group.all_gather(2.0 * size**3 * products / seconds)))
    at_once = group.cores() if clock is thread_time else None
    return best if at_once is None else best * min(1.0, at_once / group.ranks_per_host)


def _product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], None], int]:
    """Return a product of square matrices that is large enough, warm, and their size."""
    for size in _SIZES:
        work = partial(_multiply, *(torch.full((size, size), 0.5, device=device, dtype=dtype) for _ in range(3)))
        work()
        started = perf_counter()
        work()
        if perf_counter() - started > _SHORT_S:
            break
    return work, size


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Multiply as a layer does with its weights; return when it is computed."""
    torch.mm(a, b.t(), out=out)
    accelerator.synchronize(a.device)
