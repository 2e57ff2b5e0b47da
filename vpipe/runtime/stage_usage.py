"""Measure the usage of a stage in training: time, bytes, memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import torch

from vpipe import accelerator


@dataclass(frozen=True)
class StageUsage:
    """Usage of one stage in the training so far, or in some of its updates. On a GPU, times are those of the host.

    Attributes:
        forward_s, backward_s, step_s: seconds in forwards, in backwards (recompute included), in optimizer steps.
        communication_s: seconds in which its rank started transfers, copied to the host and back, and summed gradients
            over replicas.
        idle_s: seconds in which its rank waited for others, to send or to receive; NaN where a GPU's stream does
            that, and where ranks take turns in one process.
        bytes_sent: by its rank.
        versions: most weight versions held at once.
        staleness: most updates between a microbatch's forward and its backward.
        peak_activations: most microbatches whose activations were held at once.
        peak_memory_bytes: of the process (of the device, on a GPU).
        others_s: seconds in actions of kinds that a package has added.
        state_bytes: what the optimizer keeps beside the weights, master weights among it, on this replica.
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
    others_s: float = 0.0
    state_bytes: int = 0

    @property
    def working_s(self) -> float:
        """Return the seconds in which a rank with this stage alone did not wait."""
        return self.forward_s + self.backward_s + self.step_s + self.communication_s + self.others_s

    def since(self, before: StageUsage) -> StageUsage:
        """Return the times and bytes since ``before``; maxima stay those of all training."""
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in (*_OF_STAGE, *_OF_RANK)})

    @classmethod
    def of_rank(cls, stages: Sequence[StageUsage]) -> StageUsage:
        """Return the usage of a rank with these stages."""
        added = (*_OF_STAGE, "state_bytes")
        return cls(**{field.name: (sum if field.name in added else max)(getattr(stage, field.name) for stage in stages)
                      for field in fields(cls)})


_OF_STAGE = ("forward_s", "backward_s", "step_s", "others_s")
_OF_RANK = ("communication_s", "idle_s", "bytes_sent")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: resident on a CPU, allocated on a GPU."""
    if device.type != "cpu" and accelerator.counts_memory(device):
        return accelerator.peak_bytes(device)
    # Not getrusage on Linux, where that starts from the peak of the process that started this one.
    with suppress(OSError, StopIteration), open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
