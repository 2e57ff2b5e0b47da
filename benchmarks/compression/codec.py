"""How fast a processor codes and decodes: GB of fp32 per second of one core's time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time

import torch

from vpipe.extras.compression.transport import Bf16, Int8
from vpipe.runtime.transport.transport import TensorSpec

SHAPES = ((4, 128, 256), (16, 128, 1024))
CODECS = ("bf16", "int8", "int8_stochastic")
ROUNDS = 60


def rate(bytes_: int, *calls: Callable[[], object]) -> list[float]:
    """GB/s of every call; they take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, times in zip(calls, seconds, strict=True):
            started = thread_time()
            call()
            times.append(thread_time() - started)
    return [bytes_ / median(times) / 1e9 for times in seconds]


def measure() -> str:
    """A Markdown table. A link pays off below the rate at which coding, sending and decoding take as long as sending.

    That is the worst case: nothing overlaps.
    """
    lines = ["| tensor | codec | bytes | encode GB/s | decode | pays below, GB/s |", "|---|---|---:|---:|---:|---:|"]
    for shape in SHAPES:
        tensor = torch.randn(shape)
        spec = TensorSpec.from_tensor(tensor)
        for name in CODECS:
            used = Bf16() if name == "bf16" else Int8(name == "int8_stochastic")
            wire = used.encode(tensor, 0)
            encode, decode = rate(tensor.nbytes, partial(used.encode, tensor, 0), partial(used.decode, wire, spec))
            share = wire.nbytes / tensor.nbytes
            pays = (1 - share) / (1 / encode + 1 / decode)
            lines.append(f"| {'x'.join(map(str, shape))} | {name} | {share:.3f} | {encode:.1f} | "
                         f"{decode:.1f} | {pays:.1f} |")
    return "\n".join(lines)
