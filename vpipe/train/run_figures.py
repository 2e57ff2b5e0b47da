"""What a run comes to at its end: the one place that its table, its files and comparisons take their figures from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from statistics import median, quantiles
from typing import Any

from vpipe.profiling.peak import Peak
from vpipe.runtime.usage import StageUsage
from vpipe.schedules.size import Placement
from vpipe.train.metrics import Metrics, mean

WARM_UP = 2
"""Updates at the beginning of an attempt that speeds leave out, where as many again and one more follow: a process
allocates and loads what it needs in them, and agrees on shapes."""


@dataclass(frozen=True)
class RunFigures:
    """Of one attempt; of a run that went on, that is the part since then.

    Attributes:
        ranks: that trained.
        steps: made in this attempt.
        steps_done: with those of earlier attempts.
        samples_per_step: that a step trains on.
        skipped: of ``steps``, left out since something was not finite.
        time_s: that they took, evaluations left out.
        counted_steps: those whose speed counts, see :data:`WARM_UP`; the following four are theirs.
        samples_per_s, tokens_per_s: over all of them.
        step_median_s, step_p95_s: of one; 95 % took no longer than the second.
        peak: of the devices; None where nobody knows it.
        mfu, hfu: shares of the peak.
        bubble: share of its time that a rank waited for others, the mean over ranks. Its time is what its actions
            took, of those that filled and emptied the pipeline, too.
        memory_bytes: the peak of the rank that has held most: resident of a process, allocated on a GPU.
        sent_bytes: by all ranks, per step.
        versions, staleness: the most of any stage.
        first_loss, last_loss: means of the first and the last of the losses that are finite, at most ten; those of all
            attempts. None where none is.
        evaluation_loss: of the latest evaluation.
        doubt: why ``mfu`` or ``hfu`` cannot be right; None where it can.
        stages: per stage, and of each of its replicas, what :class:`~vpipe.runtime.usage.StageUsage` says.
    """

    ranks: int
    steps: int
    steps_done: int
    samples_per_step: int
    skipped: int
    time_s: float
    counted_steps: int
    samples_per_s: float
    tokens_per_s: float
    step_median_s: float
    step_p95_s: float
    peak: Peak | None
    mfu: float | None
    hfu: float | None
    bubble: float
    memory_bytes: int
    sent_bytes: float
    versions: int
    staleness: int
    first_loss: float | None
    last_loss: float | None
    evaluation_loss: float | None
    doubt: str | None
    stages: tuple[StageUsage, ...]

    @classmethod
    def of(cls, metrics: Metrics, usages: Sequence[StageUsage], placement: Placement) -> RunFigures | None:
        """Of what rank 0 recorded and what all ranks told; None of an attempt that made no step.

        Args:
            usages: of every stage, and of each of its replicas.
        """
        steps, worth = len(metrics.losses), metrics.worth
        if not steps:
            return None
        counted = metrics.update_s[WARM_UP:] if steps > 2 * WARM_UP else metrics.update_s
        rate, efficiency = len(counted) / sum(counted), worth.efficiency
        used = None if efficiency is None else efficiency.at(rate * worth.tokens)
        ranks: dict[int, list[StageUsage]] = {}
        for rank, usage in zip((rank for ranks in placement for rank in ranks), usages, strict=True):
            ranks.setdefault(rank, []).append(usage)
        losses = [loss for loss in (*metrics.past.losses, *metrics.losses) if isfinite(loss)]
        few = few_of(losses)
        evaluated = [loss for _, loss in (*metrics.past.evaluations, *metrics.evaluations)][-1:]
        return cls(
            ranks=len(ranks), steps=steps, steps_done=metrics.steps, samples_per_step=worth.samples,
            skipped=metrics.skipped, time_s=metrics.attempt_s, counted_steps=len(counted),
            samples_per_s=rate * worth.samples, tokens_per_s=rate * worth.tokens, step_median_s=median(counted),
            step_p95_s=p95(counted), peak=None if efficiency is None else efficiency.peak,
            mfu=None if used is None else used.model, hfu=None if used is None else used.hardware,
            bubble=mean(map(_waiting, ranks.values())),
            memory_bytes=max(usage.peak_memory_bytes for usage in usages),
            sent_bytes=sum(own[0].bytes_sent for own in ranks.values()) / steps,
            versions=max(usage.versions for usage in usages), staleness=max(usage.staleness for usage in usages),
            first_loss=mean(losses[:few]) if losses else None, last_loss=mean(losses[-few:]) if losses else None,
            evaluation_loss=evaluated[0] if evaluated and isfinite(evaluated[0]) else None,
            doubt=None if efficiency is None or used is None else efficiency.doubt(used), stages=tuple(usages))

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has: :meth:`as_row`, and the stages."""
        return {**self.as_row(), "stages": [asdict(usage) for usage in self.stages]}

    def as_row(self) -> dict[str, float | str | None]:
        """By name, each one value; times are in seconds, sizes in bytes."""
        row = {name: _short(getattr(self, name)) for name in OWN}
        if self.peak is None:
            return row | dict.fromkeys(PEAK)
        return row | dict(zip(PEAK, (_short(self.peak.tflops), self.peak.devices, str(self.peak)), strict=True))


OWN = tuple(field.name for field in fields(RunFigures) if field.name not in ("peak", "stages"))
PEAK = ("peak_tflops", "devices", "peak_is")
"""Keys of :meth:`RunFigures.as_row`: first the former, then the latter."""


def _short(value: Any) -> Any:
    """Digits beyond the sixth are noise."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _waiting(stages: Sequence[StageUsage]) -> float:
    """The share of its time that a rank with these stages waited; what it sent and waited for is said with each."""
    worked = sum(usage.forward_s + usage.backward_s + usage.step_s for usage in stages) + stages[0].communication_s
    waited = stages[0].idle_s
    return waited / (waited + worked) if waited else 0.0


def few_of(losses: Sequence[float]) -> int:
    """How many losses at either end are averaged."""
    return max(1, min(10, len(losses) // 4))


def p95(values: Sequence[float]) -> float:
    """What 95 % of at least one value do not exceed; between two of them it is interpolated."""
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]


def share_text(value: float | None) -> str:
    """A utilization in a table; one that cannot be is marked, and whoever shows it says its ``doubt`` below."""
    return "-" if value is None else f"{100 * value:.1f} %" + " (!)" * (value > 1)


def figure_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a row as people read them, by the heads of a table."""
    return {"samples/s": f"{row['samples_per_s']:,.1f}", "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "median": f"{1e3 * row['step_median_s']:.0f} ms", "p95": f"{1e3 * row['step_p95_s']:.0f} ms",
            "MFU": share_text(row["mfu"]), "HFU": share_text(row["hfu"]), "bubble": f"{100 * row['bubble']:.1f} %",
            "memory": bytes_text(row["memory_bytes"]), "sent": bytes_text(row["sent_bytes"])}


def bytes_text(count: float) -> str:
    """``3.50 GB``, ``16.0 MB``, ``800 B``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
