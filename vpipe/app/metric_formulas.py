"""Compute the figures of a run, for every place that shows them; docs/metrics.md defines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import quantiles

from vpipe import Plan

__all__ = ["RECENT", "WARM_UP", "Utilization", "averaged_losses", "bubble", "counted_updates", "p95", "perplexity",
           "share_text"]

bubble = Plan.bubble_of

WARM_UP = 2
"""First updates of an attempt that figures leave out, if as many again and one more follow: a process allocates memory
and agrees on shapes in them."""

RECENT = 20
"""Updates over which the speed shown while training is averaged."""


def counted_updates(update_s: Sequence[float]) -> Sequence[float]:
    """Return the times of the updates that figures are of: all but the first :data:`WARM_UP`."""
    return update_s[WARM_UP:] if len(update_s) > 2 * WARM_UP else update_s


def p95(values: Sequence[float]) -> float:
    """Return what 95 % of at least one value do not exceed, interpolated between two of them."""
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]


def averaged_losses(count: int) -> int:
    """Return how many of ``count`` losses are averaged at either end of a run."""
    return max(1, min(10, count // 4))


_HUGE_LOSS = 100.0
"""Its perplexity says nothing, and soon is no float."""


def perplexity(loss: float) -> float | None:
    """Return exp(loss), for a loss that is the mean cross-entropy per token; None where it is huge or no number."""
    return exp(loss) if loss < _HUGE_LOSS else None


@dataclass(frozen=True)
class Utilization:
    """Shares of the peak of the devices."""

    model: float  # MFU
    hardware: float  # HFU

    @classmethod
    def of(cls, forward_flops: float, again_flops: float, per_s: float, peak_flops_per_s: float) -> Utilization:
        """Compute both shares.

        With f the floating-point operations of a forward of one token through all layers, r those of its layers
        that are recomputed, n the tokens per second, and P the operations per second that all devices reach together:

            MFU = 3 f n / P        HFU = (3 f + r) n / P

        A backward takes twice the operations of a forward.

        Source: Chowdhery et al., PaLM (2022), appendix B; Korthikanti et al., Reducing Activation Recomputation (2022).
        """
        rate = per_s / peak_flops_per_s
        return cls(3 * forward_flops * rate, (3 * forward_flops + again_flops) * rate)


def share_text(share: float | None) -> str:
    """Return ``27.0 %``; a utilization above 100 %, which cannot be, is marked."""
    return "-" if share is None else f"{100 * share:.1f} %" + " (!)" * (share > 1)
