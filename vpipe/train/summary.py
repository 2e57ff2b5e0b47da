"""The summary of a run, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite

from vpipe.draw.table import filled, fitted, terminal_columns
from vpipe.draw.words import ms_text
from vpipe.errors import counted
from vpipe.measures import averaged_losses
from vpipe.sizes import size_text
from vpipe.train.device import on_processors
from vpipe.train.job import Job
from vpipe.train.metrics import Metrics
from vpipe.train.run_figures import RunFigures, figure_columns

_COLUMNS = ("stage", "rank", "layers", "forward", "backward", "step", "comm", "idle", "sent", "versions", "staleness",
            "in flight", "memory")


def headline(job: Job) -> str:
    """What a run begins with."""
    ranks = job.schedule.ranks
    to_plan, parallel = job.config.parallel.to_plan, job.config.parallel.standing_in
    return (f"{job.config.model.name}: {counted(len(job.model), 'layer')} in {counted(len(job.placement), 'stage')}"
            + ("" if "partition" in to_plan else f" {list(job.partition)}")
            + ("" if "schedule" in to_plan else f", schedule {parallel.order}")
            + ("" if (precision := job.config.training.precision) == "fp32" else f", {precision}") + ", "
            + (f"{', '.join(to_plan)} to be planned, " if to_plan else "")
            + ("one process per stage" if ranks == len(job.placement) == len(set(job.placement)) else
               f"{ranks} process{'es' * (ranks > 1)}"))


def summary(job: Job, metrics: Metrics, figures: RunFigures | None, saves: Sequence[str] = ()) -> str:
    """Losses, a table of figures, and a row per stage and rank, in lines that fit the terminal. Times of a stage are
    milliseconds per update; ``in flight`` counts microbatches whose activations a stage held at once. Of a run that
    went on, times are those of this attempt, finite losses those of all.

    Args:
        figures: None of an attempt that made no step.
        saves: lines about its checkpoints.
    """
    lines = []
    if figures is not None:
        lines.append(f"{counted(figures.steps, job.step_name)}"
                     + (f" (of {figures.steps_done})" if figures.steps_done != figures.steps else "")
                     + f" in {figures.time_s:.1f} s")
    if metrics.skipped:
        lines.append(f"{metrics.skipped} of {counted(len(metrics.losses), job.step_name)} were skipped: not finite")
    if metrics.skipped and metrics.skipped == len(metrics.losses):
        scale = job.config.training.computed.loss_scale
        lines.append("warning: nothing was trained, and the speed below is that of nothing" + (
            "" if scale is None else f"; lower training.loss_scale, which is {scale:g}, or leave it out"))
    losses = [loss for loss in (*metrics.past.losses, *metrics.losses) if isfinite(loss)]
    if losses and figures is not None:
        few = averaged_losses(len(losses))
        lines.append(f"training loss {figures.first_loss:.3f} -> {figures.last_loss:.3f} "
                     f"(mean of the first {few}, mean of the last {few})")
    lines += [f"evaluation loss after {counted(step + 1, job.step_name)}: {loss:.4f}"
              for step, loss in (*metrics.past.evaluations, *metrics.evaluations)]
    lines += saves
    return "\n".join(lines if figures is None else [*lines, "", *_figures(job, figures), "", *_stages(job, figures)])


def _figures(job: Job, figures: RunFigures) -> list[str]:
    columns = figure_columns(figures.as_row())
    left_out = figures.steps - figures.counted_steps
    notes = [f"without the first {counted(left_out, job.step_name)}"] if left_out else []
    notes.append("no MFU: the family does not say what its layers compute" if figures.peak is None else
                 f"MFU, HFU: of {figures.peak}")
    width = terminal_columns()
    lines = [*fitted(list(columns), [list(columns.values())], width, names=0),
             *filled("(bubble: share of time in which ranks wait for others; memory: peak of the fullest "
                     f"{'process' if on_processors(job.config) else 'GPU'}; sent: by all, per {job.step_name})",
                     width),
             *filled(f"({'; '.join(notes)})", width)]
    return lines if figures.doubt is None else [*lines, f"warning: {figures.doubt}"]


def _stages(job: Job, figures: RunFigures) -> list[str]:
    partition, steps, width = job.partition, figures.usage_steps, terminal_columns()
    ends = list(accumulate(partition))
    homes = [(stage, rank) for stage, ranks in enumerate(job.placement) for rank in ranks]
    rows = []
    for (stage, rank), usage in zip(homes, figures.stages, strict=True):
        times = (usage.forward_s, usage.backward_s, usage.step_s, usage.communication_s, usage.idle_s)
        first, end = ends[stage] - partition[stage], ends[stage]
        rows.append([str(stage), str(rank), f"{first}-{end - 1}" if first < end - 1 else str(first),
                     *(ms_text(seconds / steps) for seconds in times), size_text(usage.bytes_sent / steps),
                     str(usage.versions), str(usage.staleness), str(usage.peak_activations),
                     size_text(usage.peak_memory_bytes)])
    return [*fitted(_COLUMNS, rows, width, names=2),
            *filled(f"(forward to idle: milliseconds per {job.step_name}; idle: waiting for other ranks; sent: per "
                    f"{job.step_name}; in flight: microbatches)", width)]
