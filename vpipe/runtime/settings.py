"""What the engine is told beside the model and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vpipe.runtime.compress import Compression
from vpipe.runtime.executor import Executor
from vpipe.runtime.precision import FP32, Precision

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None] | None
"""What an optimizer factory may return: an optimizer, a list of them, or None where nothing is to be trained."""

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], Optimizers]
"""Named parameters of a stage -> what steps them."""


@dataclass(frozen=True)
class Settings:
    """What the engine needs to know beside the model.

    Attributes:
        microbatches: per batch.
        recompute: per stage the numbers, in the model, of the layers that are recomputed.
        factor: learning rate of an update relative to the optimizer's own.
        clip: greatest gradient norm; of all stages with a flush, of each stage without.
        seed: of initialisation and dropout.
        device: where this process computes.
        timeout_s: how long a transfer may take.
        compression: how tensors travel between stages; None: as they are.
        skip: whether an update from a loss or a gradient that is not finite is left out.
        precision: in which numbers layers compute.
        executor: how actions are carried out.
    """

    microbatches: int
    recompute: Sequence[frozenset[int]]
    factor: Callable[[int], float]
    clip: float | None
    seed: int
    device: torch.device
    timeout_s: float
    compression: Compression | None
    skip: bool = False
    precision: Precision = FP32
    executor: Executor = "overlapped"

    @property
    def needs_norms(self) -> bool:
        """Whether an update depends on the norms of gradients: with a flush on those of all stages."""
        return self.clip is not None or self.skip or self.precision.scaled
