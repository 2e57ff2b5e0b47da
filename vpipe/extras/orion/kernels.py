"""Profile the GPU kernels of a run for the Orion library: what bounds each, and how many multiprocessors it needs.

The source is what torch's profiler wrote, a Kineto trace per rank. The columns are those of Orion (Strati et al.,
EuroSys 2024), which finds them with Nsight Compute.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from vpipe.errors import UserError

HEADER = ("Name", "Profile", "Memory_footprint", "SM_usage", "Duration")
MOST_BLOCKS = 32
"""Blocks that a multiprocessor holds at most, whatever their size (CUDA C programming guide, compute capability 8.0 and
9.0)."""


class Bound(IntEnum):
    """What a kernel waits for, as the library counts it."""

    UNKNOWN = -1
    MEMORY = 0
    COMPUTATION = 1


@dataclass(frozen=True)
class KernelProfile:
    """A kernel of one name: ``multiprocessors`` that its largest launch needs, ``duration_s`` of the median launch."""

    name: str
    bound: Bound
    multiprocessors: int
    duration_s: float


_MEMORY_FIRST = re.compile(r"split_?k_?reduce|gemv", re.IGNORECASE)
_COMPUTATION = re.compile(r"gemm|xmma|cutlass|nvjet|convolve|conv2d|winograd|dgrad|wgrad|fmha|flash", re.IGNORECASE)
_MEMORY = re.compile(r"elementwise|reduce|norm|softmax|copy|fill|cat(array|batch)|index|gather|scatter|embedding|"
                     r"dropout|transpose|multi_?tensor|triton_(poi|red|per)_|nll_loss", re.IGNORECASE)


def bound_of(name: str) -> Bound:
    """Return what a kernel is bound by, as its name tells: products of matrices, convolutions and attention by
    computation; what does little with each number that it reads by memory.

    Small products are bound by memory, too; a name does not tell their size.
    """
    if _MEMORY_FIRST.search(name):
        return Bound.MEMORY
    if _COMPUTATION.search(name):
        return Bound.COMPUTATION
    return Bound.MEMORY if _MEMORY.search(name) else Bound.UNKNOWN


def multiprocessors_needed(launch: Mapping[str, Any], device: Mapping[str, Any]) -> int:
    """Return how many multiprocessors hold all blocks of a launch at once, at most those of the device.

    Args:
        launch: ``args`` of a kernel's event: ``grid``, ``block``, ``registers per thread``, ``shared memory`` (bytes
            of a block).
        device: of the trace's ``deviceProperties``.
    """
    warp: int = device["warpSize"]
    warps = -(-prod(launch["block"]) // warp)
    fitting: list[int] = [MOST_BLOCKS, device["maxThreadsPerMultiprocessor"] // (warps * warp)]
    if registers := launch["registers per thread"]:
        fitting.append(device["regsPerMultiprocessor"] // (registers * warps * warp))
    if shared := launch["shared memory"]:
        fitting.append(device["sharedMemPerMultiprocessor"] // shared)
    resident = max(1, min(fitting))
    blocks: int = prod(launch["grid"])
    return min(int(device["numSms"]), -(-blocks // resident))


def kernel_profiles(traces: Iterable[Path]) -> list[KernelProfile]:
    """Return the kernels in traces of torch's profiler, the longest in all first.

    Raises:
        UserError: a file is no such trace.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    needed: defaultdict[str, int] = defaultdict(int)
    for path in traces:
        for name, duration_s, multiprocessors in _launches(path):
            seconds[name].append(duration_s)
            needed[name] = max(needed[name], multiprocessors)
    return [KernelProfile(name, bound_of(name), needed[name], median(times))
            for name, times in sorted(seconds.items(), key=lambda one: -sum(one[1]))]


def _launches(path: Path) -> Iterator[tuple[str, float, int]]:
    """Yield name, seconds and multiprocessors of every launch in a trace."""
    try:
        trace = json.loads(path.read_bytes())
        devices = {device["id"]: device for device in trace.get("deviceProperties", ())}
        for event in trace["traceEvents"]:
            if event.get("cat") == "kernel":
                launch = event["args"]
                yield event["name"], 1e-6 * event["dur"], multiprocessors_needed(launch, devices[launch["device"]])
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}", hint="check the path") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is no trace of torch's profiler: {type(error).__name__} {error}",
                        hint="profile the run again") from None


def kernel_csv(profiles: Iterable[KernelProfile]) -> str:
    """Return the file that ``ORION_KERNEL_INFO`` names; durations are in nanoseconds, footprints are not known."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows((one.name, int(one.bound), 0, one.multiprocessors, round(1e9 * one.duration_s))
                     for one in profiles)
    return written.getvalue()
