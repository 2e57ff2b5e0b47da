"""The summary of a run, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite

from vpipe.errors import counted
from vpipe.runtime.usage import StageUsage
from vpipe.train.job import Job
from vpipe.train.metrics import Metrics, mean

_COLUMNS = ("stage", "layers", "forward", "backward", "step", "comm", "idle", "sent", "versions", "staleness",
            "in flight", "memory")


def headline(job: Job) -> str:
    """What a run begins with."""
    ranks = job.schedule.ranks
    to_plan, parallel = job.config.parallel.to_plan, job.config.parallel.standing_in
    return (f"{job.config.model.name}: {len(job.model)} layers in {len(job.placement)} stages"
            + ("" if "partition" in to_plan else f" {list(job.partition)}")
            + ("" if "schedule" in to_plan else f", schedule {parallel.schedule}") + ", "
            + (f"{', '.join(to_plan)} to be planned, " if to_plan else "")
            + ("one process per stage" if ranks == len(job.placement) == len(set(job.placement)) else
               f"{ranks} processes"))


def summary(job: Job, metrics: Metrics, usages: Sequence[StageUsage], saves: Sequence[str] = ()) -> str:
    """Throughput, losses, and a row per stage. Times of a stage are milliseconds per update; ``in flight`` counts
    microbatches whose activations a stage held at once. Of a run that went on, times are those of this attempt,
    finite losses those of all.

    Args:
        saves: lines about its checkpoints.
    """
    updates, past = len(metrics.losses), metrics.past
    losses = [loss for loss in (*past.losses, *metrics.losses) if isfinite(loss)]
    lines = []
    if updates:
        rate = updates / metrics.attempt_s
        lines.append(f"{counted(updates, job.step_name)}"
                     + (f" (of {metrics.steps})" if metrics.steps != updates else "") +
                     f" in {metrics.attempt_s:.1f} s: "
                     f"{rate * job.samples_per_update:.1f} samples/s, {rate * job.tokens_per_update:,.0f} tokens/s, "
                     f"{1e3 * metrics.median_update_s():.0f} ms per {job.step_name} (median)")
    if metrics.skipped:
        lines.append(f"{metrics.skipped} of {counted(updates, job.step_name)} were skipped: not finite")
    if losses:
        few = max(1, min(10, len(losses) // 4))
        lines.append(f"training loss {mean(losses[:few]):.3f} -> {mean(losses[-few:]):.3f} "
                     f"(mean of the first {few}, mean of the last {few})")
    lines += [f"evaluation loss after {counted(step + 1, job.step_name)}: {loss:.4f}"
              for step, loss in (*past.evaluations, *metrics.evaluations)]
    lines += saves
    return "\n".join([*lines, "", *_table(job, updates, usages)] if updates else lines)


def _table(job: Job, updates: int, usages: Sequence[StageUsage]) -> list[str]:
    partition = job.partition
    rows = [list(_COLUMNS)]
    ends = list(accumulate(partition))
    homes = [(stage, rank) for stage, ranks in enumerate(job.placement) for rank in ranks]
    for (stage, rank), usage in zip(homes, usages, strict=True):
        name = str(stage) if len(job.placement[stage]) == 1 else f"{stage} (rank {rank})"
        times = (usage.forward_s, usage.backward_s, usage.step_s, usage.communication_s, usage.idle_s)
        first, end = ends[stage] - partition[stage], ends[stage]
        rows.append([name, f"{first}-{end - 1}", *(f"{1e3 * t / updates:.1f} ms" for t in times),
                     _bytes(usage.bytes_sent / updates), str(usage.versions), str(usage.staleness),
                     str(usage.peak_activations), _bytes(usage.peak_memory_bytes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*lines, f"(per {job.step_name}; idle is waiting for other stages; memory is the peak of the process)"]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
