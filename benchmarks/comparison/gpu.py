"""The emulated GPU, an RTX 2080 Ti: what is published of it, and what is assumed. See README.md for the sources."""

from __future__ import annotations

from dataclasses import dataclass

PEAK_FLOPS_PER_S = 13.45e12
"""fp32, boost clock (NVIDIA's data sheet)."""
REACHED = 0.726
"""Share of the peak that BERT-large reaches in very large microbatches: that of the fit, see :data:`PUBLISHED`."""
MEMORY_BYTES = 11_000_000_000
"""11 GB, of the card's 11 GiB: the other 0.8 GB are left to CUDA's context and its libraries."""
DEVICE_BYTES_PER_S = 616e9 * 0.75
"""Its memory's, of which passes over weights reach three quarters."""
LINK_LATENCY_S, LINK_BYTES_PER_S = 20e-6, 10e9
"""PCIe 3.0 x16 through the host's memory: these cards have no direct way to each other."""


@dataclass(frozen=True)
class Curve:
    """How fast a GPU computes a microbatch.

    One of n tokens takes the time of n + ``lost_tokens`` at full speed: kernels are launched one by one, and short ones
    do not fill the device.

    Attributes:
        name: for tables.
        lost_tokens: what every microbatch costs beside its own.
    """

    name: str
    lost_tokens: float

    def seconds(self, flops: float, tokens: int) -> float:
        """Of ``flops`` on a microbatch of ``tokens``."""
        return flops / (PEAK_FLOPS_PER_S * REACHED) * (1 + self.lost_tokens / tokens)


PUBLISHED = Curve("published", 112)
"""Through NVIDIA's own throughput of BERT-large, fp32, on a V100 at 1, 2, 4 and 8 sequences of 128 tokens: 76.75,
100.82, 117.59, 130.42 per second. Least squares of time over work; the line is within 0.6 % of all four."""
FLAT = Curve("flat", 0)
"""A microbatch of any size computes at full speed."""
STEEP = Curve("steep", 512)
"""Half the speed at 512 tokens, 4 sequences of 128: far below what was published, to see what it would change."""
CURVES = (FLAT, PUBLISHED, STEEP)
