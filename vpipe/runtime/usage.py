"""What a stage used: time, bytes, memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class StageUsage:
    """One stage's part in the training so far.

    Attributes:
        forward_s, backward_s, step_s: seconds in forwards, in backwards (recompute included), in optimizer steps.
        communication_s: seconds in starting transfers and in summing gradients over replicas.
        idle_s: seconds waiting for tensors of other ranks: bubble, imbalance and transfer time alike.
        bytes_sent: by the stage's rank.
        versions: most weight versions held at once.
        staleness: most updates between a microbatch's forward and its backward.
        peak_activations: most microbatches whose activations were held at once.
        peak_memory_bytes: of the process (of the device, on a GPU).
    """

    forward_s: float
    backward_s: float
    step_s: float
    communication_s: float
    idle_s: float
    bytes_sent: int
    versions: int
    staleness: int
    peak_activations: int
    peak_memory_bytes: int

    @classmethod
    def empty(cls) -> StageUsage:
        return cls.of(torch.zeros(len(fields(cls)), dtype=torch.float64))

    @classmethod
    def of(cls, tensor: Tensor) -> StageUsage:
        """The inverse of :meth:`as_tensor`."""
        values = tensor.tolist()
        return cls(*values[:5], *map(int, values[5:]))

    def as_tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process held so far: resident on a CPU, allocated on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # not getrusage: on Linux it starts from the peak of the process that started this one
        with open("/proc/self/status") as status:
            return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass  # not Linux
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
