"""How much of what its devices could compute a run does compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch

from vpipe.measures import Utilization
from vpipe.profiling.peak import Peak, peak_of
from vpipe.profiling.world import World
from vpipe.train.device import device_of
from vpipe.train.job import Job
from vpipe.train.model_settings import model_flops


@dataclass(frozen=True)
class Efficiency:
    """What MFU and HFU of a run follow from, once its tokens per second are known.

    Attributes:
        layer_flops: operations of a token's forward, per layer.
        again_flops: those of the layers that are recomputed.
        peak: of the devices.
    """

    layer_flops: tuple[float, ...]
    again_flops: float
    peak: Peak

    @classmethod
    def of(cls, job: Job) -> Efficiency | None:
        """Every rank of a run calls this: where nobody knows the peak they measure it together.

        Returns:
            The same on every rank; None of a family that does not say what its layers compute.
        """
        layers = layer_flops(job)
        if layers is None:
            return None
        config, device = job.config, device_of(job.config)
        dtype = config.training.computed.dtype or torch.float32
        peak = peak_of(World(device), device, dtype, config.metrics.peak_tflops)
        return cls(tuple(layers), 0.0, peak).recomputing(job.recomputed)

    def recomputing(self, layers: Iterable[Iterable[int]]) -> Efficiency:
        """The same where these layers are recomputed, per stage by their numbers in the model."""
        return replace(self, again_flops=sum(self.layer_flops[number] for number in chain.from_iterable(layers)))

    def at(self, tokens_per_s: float) -> Utilization:
        """At a speed of the run."""
        return Utilization.of(sum(self.layer_flops), self.again_flops, tokens_per_s, self.peak.flops_per_s)

    def doubt(self, used: Utilization) -> str | None:
        """What is to be said wherever shares are shown that cannot be; None of those that can."""
        name, share = ("MFU", used.model) if used.model > 1 else ("HFU", used.hardware)
        if share <= 1:
            return None
        least = share * self.peak.tflops
        return (f"the {name} of {100 * share:.0f} % cannot be: the peak is wrong ({self.peak}); the devices reached "
                f"{least:,.4g} TFLOP/s each, so set metrics.peak_tflops to more than that")


def layer_flops(job: Job) -> list[int] | None:
    """Operations of a token's forward, per layer; None of a family that does not say them."""
    return model_flops(job.config.model, len(job.model))
