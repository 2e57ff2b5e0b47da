"""Say in lines what a run is when it begins, and what it did at its end: as figures, as text and as a row of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from math import isfinite
from statistics import fmean, median
from typing import Any

from vpipe import Pipeline
from vpipe.app.data.dataset import Described, Padded, VaryingBatches
from vpipe.app.metric_formulas import averaged_losses, bubble, counted_updates, p95, perplexity, share_text
from vpipe.app.train.job import Job, on_processors
from vpipe.app.train.metrics import Metrics, finite
from vpipe.app.train.peak_flops import PeakFlops
from vpipe.app.train.rank_times import FIGURES, figure_texts
from vpipe.app.visualize.table import compact, filled, fitted, milliseconds, terminal_columns
from vpipe.errors import counted
from vpipe.runtime import StageUsage
from vpipe.schedules import CsvFile, delays
from vpipe.units import size_text


def headline(job: Job) -> str:
    """Describe a job in the line that a run begins with."""
    ranks, parts = job.schedule.ranks, job.config.parallel.tensor
    to_plan, parallel = job.config.parallel.to_plan, job.config.parallel.standing_in
    return (f"{job.config.model.name}: {counted(len(job.model), 'layer')} in {counted(job.cut.count, 'stage')}"
            + ("" if "partition" in to_plan else f" {list(job.cut.partition)}")
            + ("" if "schedule" in to_plan else f", schedule {parallel.order_text}")
            + ("" if (precision := job.config.training.precision) == "fp32" else f", {precision}")
            + (", packed" if job.config.model.packed else "") + ", "
            + (f"{', '.join(to_plan)} to be planned, " if to_plan else "")
            + ("one process per stage" if sorted(job.schedule.placement) == [(rank,) for rank in range(ranks)]
               else _processes(job))
            + ("" if parts == 1 else f", times {parts} that split its layers: ranks " + ", ".join(
                f"{first}-{first + parts - 1}" for first in range(0, job.processes, parts)) + " on one host each"))


def _processes(job: Job) -> str:
    """Count the processes, and the stages of each where a schedule gives them several; say what gives more than one."""
    stages, ranks = job.cut.count, job.schedule.ranks
    of_each = Counter(rank for own in job.schedule.placement for rank in own).values()
    text = counted(ranks, "process") + (f" of {counted(max(of_each), 'stage')}" + " each" * (ranks > 1)
                                        if len(set(of_each)) == 1 < max(of_each) else "")
    if ranks > 1 or job.config.parallel.stage_to_rank_map is not None:
        return text
    return text + (f" (2 with parallel.model_parallel_size {2 * stages})" if 2 * stages <= len(job.model) else
                   f" ({stages} with parallel.schedule 1f1b)")


def size_lines(job: Job) -> str:
    """Describe the size of the model, of an epoch and of a held-out text in lines, which follow a run's first."""
    config, samples, dataset = job.config, job.dataset.samples("train"), job.dataset
    varying = isinstance(dataset, VaryingBatches)
    tokens = varying or "input_ids" in job.model.batch
    length = config.model.sequence_length
    steps, rest = divmod(job.epochs.batches * config.microbatches, job.schedule.assignment.step_microbatches)
    epoch = [counted(samples, "sample", commas=True),
             *([counted(job.epochs.tokens if varying else samples * length, "token", commas=True)] if tokens else []),
             "about " * (rest > 0) + counted(steps, job.step_name, commas=True)]
    if isinstance(dataset, Padded):
        epoch.append(f"{100 * dataset.padding_share(config.dataset.batch_size):.1f} % padding")
    parameters = job.model.parameter_count()
    text = job.held_out_text
    return (("parameters unknown" if parameters is None else counted(parameters, "parameter", commas=True))
            + f", vocabulary of {config.model.vocab_size:,}" * tokens
            + "".join(f"\n{line}" for line in (dataset.lines if isinstance(dataset, Described) else ()))
            + f"\nan epoch: {', '.join(epoch)}"
            + ("" if text is None else f"\nheld out: {counted(text.tokens, 'token', commas=True)} of "
               f"{text.bytes / text.tokens:.2f} bytes, unigram entropy {text.unigram_entropy:.2f} nats"))


def update_line(job: Job) -> str | None:
    """Describe an update of several ranks, and the delay of its gradients, if there is one.

    What would lower the delay follows where :func:`delay_warning` says nothing.
    """
    said, better = job.advice.delays, job.advice.fewer_updates
    if said is None and not (job.schedule.flush and job.schedule.ranks > 1):
        return None
    microbatches = counted(job.schedule.assignment.step_microbatches, "microbatch")
    size = f"{counted(job.step_size[0], 'sample')} in {microbatches}"
    update = f"{'an' if job.step_name == 'update' else 'a'} {job.step_name}: {size}"
    if said is None:
        return update
    return f"{update}; {said}" + (f"; less with {better}" if better is not None and not delay_warning(job) else "")


def delay_warning(job: Job) -> str | None:
    """Return a warning with its remedies where late gradients cost much; None elsewhere."""
    training = job.config.training
    remedies = {"training.optimizer muon": training.optimizer != "muon",
                "training.delay_correction extrapolate": training.delay_correction == "none"}
    return job.advice.late_gradients(*(remedy for remedy, is_left in remedies.items() if is_left))


def summary(job: Job, metrics: Metrics, figures: RunFigures | None, saves: Sequence[str] = (),
            held_bytes: int = 0) -> str:
    """Return losses, a table of figures, and a row per stage and rank, in lines that fit the terminal.

    For a resumed run, times are those of this attempt and losses those of all.

    Args:
        figures: None for an attempt that made no step.
        saves: lines about its checkpoints.
        held_bytes: what a process took before any layer was built.
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
            "" if scale is None else f"; lower training.loss_scale, which is {scale:g}"
            + ", or leave it out" * (not job.config.parallel.asynchronous)))
    losses = [loss for loss in (*metrics.past.losses, *metrics.losses) if isfinite(loss)]
    if figures is not None and figures.first_loss is not None and figures.last_loss is not None:
        few = averaged_losses(len(losses))
        first, last = perplexity(figures.first_loss), perplexity(figures.last_loss)
        lines.append(f"training loss {figures.first_loss:.3f} -> {figures.last_loss:.3f}"
                     + (f", perplexity {compact(first)} -> {compact(last)} "
                        if job.learns_next_tokens and first is not None and last is not None else " ")
                     + (f"(mean of the first {few}, mean of the last {few})" if few > 1 else "(the first, the last)"))
    evaluations = metrics.evaluations
    lines += [evaluation_text(job, found.step + 1, found.loss, found.averaged) for found in evaluations]
    if evaluations and (text := job.held_out_text) is not None:  # beside a model that sees no context
        less = text.unigram_entropy - evaluations[-1].loss
        lines.append(f"that is {abs(less):.2f} nats per token {'below' if less >= 0 else 'above'} the unigram entropy "
                     f"of the held-out text, {text.unigram_entropy:.2f}")
        passes = job.epochs.locate(job.samples_done + sum(metrics.samples)).epoch
        if less < 0 and figures is not None and figures.last_loss is not None and \
                figures.last_loss <= text.unigram_entropy - BY_HEART and text.alike >= ALIKE and \
                passes >= FEWEST_PASSES and metrics.steps >= FEWEST_UPDATES:
            lines.append(f"it learned its data by heart: the training loss, {figures.last_loss:.2f}, is far below that "
                         "entropy; what helps is more data, else fewer steps, a smaller model, or a larger "
                         "model.dropout or training.weight_decay")
    lines += saves
    return "\n".join(lines if figures is None else [*lines, "", *_figures(job, figures, held_bytes), "",
                                                    *_stages(job, figures)])


def evaluation_text(job: Job, steps: int, loss: float, averaged: float | None = None) -> str:
    """Describe an evaluation; where the loss is that of next tokens with perplexity and, on a text, bits per byte."""
    per_token = perplexity(loss) if job.learns_next_tokens else None
    behind = "" if per_token is None else f", perplexity {compact(per_token)}"
    if per_token is not None and (text := job.held_out_text) is not None:
        behind += f", {text.bits_per_byte(loss):.2f} bits per byte"
    if averaged is not None:
        behind += f"; with averaged weights {averaged:.4f}"
    return f"evaluation loss after {counted(steps, job.step_name)}: {loss:.4f}{behind}"


BALANCED = 0.15
"""Share above the mean of all ranks that a rank may work without being named."""

BETTER = 0.05
"""Share of the slowest rank's work that another partition must save, or that one is not named."""

LANES_ALIKE = 0.05
"""Share by which a rank may work longer than those of other lanes with the same stage without being named."""

BY_HEART = 1.0
"""Nats per token by which a model that learned its training text by heart is better on it than one without context."""

ALIKE, FEWEST_PASSES, FEWEST_UPDATES = 0.55, 3, 50
"""A held-out text that has less in common with the training text says nothing of this; nor do fewer passes over the
data, nor fewer updates."""


def _figures(job: Job, figures: RunFigures, held_bytes: int) -> list[str]:
    columns = figure_columns(figures.as_row())
    left_out = figures.steps - figures.counted_steps
    notes = [f"without the first {counted(left_out, job.step_name)}"] if left_out else []
    notes.append("no MFU: the family does not say what its layers compute" if figures.peak is None else
                 f"MFU, HFU: of {figures.peak}")
    width, plan = terminal_columns(), job.plan and job.plan.predictions
    if on_processors(job.config) and held_bytes:
        peak, process = (plan.fullest_rank[1], plan.process_bytes) if plan else (0, 0)
        notes.append(f"memory: {size_text(held_bytes)} Python, torch and the data, "
                     f"{size_text(max(0, figures.memory_bytes - held_bytes))} tensors and what computing takes"
                     + (f"; planned were {size_text(peak)}, {size_text(process)} of them without tensors"
                        if process else ""))
    lines = [*fitted(list(columns), [list(columns.values())], width, names=0),
             *filled("(bubble: share of time in which ranks wait for others; memory: peak of the fullest "
                     f"{'process' if on_processors(job.config) else 'GPU'}; sent: by all, per {job.step_name})",
                     width),
             *filled(f"({'; '.join(notes)})", width)]
    return lines if figures.doubt is None else [*lines, f"warning: {figures.doubt}"]


def _stages(job: Job, figures: RunFigures) -> list[str]:
    partition, steps, width = job.cut.partition, figures.usage_steps, terminal_columns()
    late = job.advice.delays is not None
    held = "microbatches" if (slices := job.schedule.assignment.slices) == 1 else f"slices, {slices} a microbatch"
    heads, spent = figure_texts([[getattr(usage, name) / steps for name in FIGURES] for usage in figures.stages])
    columns = ["stage", "rank", "layers", *heads, "versions", "staleness", *(["mean delay"] if late else []),
               "in flight", "memory"]
    ends = list(accumulate(partition))
    homes = [(stage, rank) for stage, ranks in enumerate(job.homes) for rank in ranks]
    rows = []
    for (stage, rank), usage, texts in zip(homes, figures.stages, spent, strict=True):
        first, end = ends[stage] - partition[stage], ends[stage]
        rows.append([str(stage), str(rank), f"{first}-{end - 1}" if first < end - 1 else str(first), *texts,
                     str(usage.versions), str(usage.staleness),
                     *([f"{job.advice.mean_delays[stage]:.3g}"] if late else []), str(usage.peak_activations),
                     size_text(usage.peak_memory_bytes)])
    return [*fitted(columns, rows, width, names=2),
            *filled(f"(forward to idle: milliseconds per {job.step_name}; idle: waiting for other ranks; sent: per "
                    f"{job.step_name}; " + "staleness: most updates that a gradient was late; mean delay: of the "
                    "schedule, in updates; " * late + f"in flight: {held})", width),
            *_slowest(job, figures), *_lanes(job, figures, homes), *_owners(job, figures, homes)]


def _slowest(job: Job, figures: RunFigures) -> Iterator[str]:
    """Yield which rank works longest, if clearly longer than the mean and than one of another partition would.

    A GPU's work is not in the times of a process.
    """
    if job.config.parallel.tensor > 1 or not on_processors(job.config):
        return
    work_s = dict.fromkeys(range(figures.ranks), 0.0)
    for rank, usage in zip((rank for ranks in job.homes for rank in ranks), figures.stages, strict=True):
        work_s[rank] += (usage.working_s - usage.communication_s) / figures.usage_steps
    rank = max(work_s, key=work_s.__getitem__)
    mean_s = sum(work_s.values()) / len(work_s)
    layers = [work_s[ranks[0]] / size for ranks, size in zip(job.homes, job.cut.partition, strict=True)
              for _ in range(size)]  # as if those of a stage took equally long
    sizes = job.model.balanced(job.cut.count, layers)
    heaviest_s = max(sum(layers[end - size:end]) for size, end in zip(sizes, accumulate(sizes), strict=True))
    movable = figures.ranks != job.cut.count or heaviest_s < (1 - BETTER) * work_s[rank]
    if work_s[rank] > (1 + BALANCED) * mean_s and movable:
        planned = job.plan is not None or CsvFile.is_path(job.config.parallel.schedule)
        remedy = "" if planned else "; vpipe plan CONFIG finds a better partition"
        yield from filled(f"({job.describe(rank)} works {milliseconds(work_s[rank])} per {job.step_name}, "
                          f"{100 * (work_s[rank] / mean_s - 1):.0f} % more than the ranks on average{remedy})",
                          terminal_columns())


def _lanes(job: Job, figures: RunFigures, homes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield, where ranks split layers, the ranks of each lane, what their figures hold, and which take longer."""
    parts, width = job.config.parallel.tensor, terminal_columns()
    if parts == 1:
        return
    ranks = " and ".join(", ".join(map(str, range(lane, job.processes, parts))) for lane in range(parts))
    yield from filled(f"({parts} lanes, of ranks {ranks}: forward, backward and step include what layers exchange "
                      "between lanes, and waiting for it; sent does not)", width)
    for at in range(0, len(homes), parts):  # those that split the same layers
        spent = {homes[at + lane]: figures.stages[at + lane].working_s for lane in range(parts)}
        (stage, most), (_, least) = (pick(spent, key=spent.__getitem__) for pick in (max, min))
        if spent[stage, most] > (1 + LANES_ALIKE) * spent[stage, least]:
            more = 100 * (spent[stage, most] / spent[stage, least] - 1)
            yield from filled(f"(of stage {stage} rank {most} takes {more:.0f} % longer than rank {least})", width)


def _owners(job: Job, figures: RunFigures, homes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield, of a run in which replicas each step a part of their stage, which ranks send and keep most."""
    parts = job.config.parallel.tensor
    parted = [(stage, rank, usage) for (stage, rank), usage in zip(homes, figures.stages, strict=True)
              if job.config.parallel.zero1 and len(job.schedule.placement[stage]) > 1]
    if parted:
        _, sender, busiest = max(parted, key=lambda each: each[2].bytes_sent)
        stage, keeper, fullest = max(parted, key=lambda each: each[2].state_bytes)
        total = sum(usage.state_bytes for other, rank, usage in parted
                    if other == stage and rank % parts == keeper % parts)
        lane = "" if parts == 1 else f" in lane {keeper % parts}"
        yield from filled(f"(zero1: of the replicas rank {sender} sends most, "
                          f"{size_text(busiest.bytes_sent / figures.usage_steps)}; rank {keeper} keeps most of an "
                          f"optimizer's state, {size_text(fullest.state_bytes)} of the {size_text(total)} of stage "
                          f"{stage}{lane})", terminal_columns())


@dataclass(frozen=True)
class RunFigures:
    """The figures of one attempt of a run; ``None`` where a figure is unknown."""

    ranks: int
    steps: int  # of this attempt
    steps_done: int  # of all attempts
    samples_per_step: int
    skipped: int  # steps of this attempt that were skipped, since something was not finite
    time_s: float  # of the steps, without evaluations
    counted_steps: int  # steps that the figures count, see metric_formulas.counted_updates
    samples_per_s: float
    tokens_per_s: float
    step_median_s: float
    step_p95_s: float
    peak: PeakFlops | None
    mfu: float | None
    hfu: float | None
    bubble: float | None
    memory_bytes: int  # largest peak of any rank: resident for a process, allocated for a GPU
    sent_bytes: float  # by all ranks, per step
    versions: int  # largest of any stage
    staleness: int  # largest of any stage
    mean_delay: float | None  # largest of any stage of the schedule, in updates; None where the caller gives none
    first_loss: float | None  # mean of the first finite losses of all attempts, at most ten
    last_loss: float | None  # mean of the last ones
    evaluation_loss: float | None  # of the latest evaluation
    doubt: str | None  # why mfu or hfu cannot be right
    stages: tuple[StageUsage, ...]  # usage of each replica of each stage, and of each lane, in usage_steps
    usage_steps: int  # steps that bubble, sent_bytes and stages count: the counted ones, if they can be told apart

    @classmethod
    def gathered(cls, metrics: Metrics, pipe: Pipeline, homes: Sequence[Sequence[int]]) -> RunFigures | None:
        """Compute the figures of a run; every rank must call it. ``homes``: the processes of each stage."""
        counted = len(counted_updates(metrics.update_s))
        before = metrics.warm_usage if counted < len(metrics.update_s) else None
        delay = max(delays.mean_delay(pipe.lowered, stage) for stage in range(pipe.lowered.stages))
        return cls.from_metrics(metrics, pipe.usage(before), homes, None if before is None else counted, delay)

    @classmethod
    def from_metrics(cls, metrics: Metrics, usages: Sequence[StageUsage], placement: Sequence[Sequence[int]],
                     usage_steps: int | None = None, mean_delay: float | None = None) -> RunFigures | None:
        """Compute the figures from rank 0's metrics and the usage of all ranks; None for an attempt without a step.

        Args:
            usages: of each replica of each stage, and of each lane.
            placement: ranks of each stage, in the order of ``usages``.
            usage_steps: number of last steps that ``usages`` count; None for all of the attempt.
            mean_delay: largest of any stage of the schedule, in updates.
        """
        steps, size = len(metrics.losses), metrics.size
        if not steps:
            return None
        usage_steps = usage_steps or steps
        counted = counted_updates(metrics.update_s)
        per_s = [sum(own[-len(counted):]) / sum(counted) for own in (metrics.samples, metrics.tokens)]
        efficiency = size.efficiency
        used = None if efficiency is None else efficiency.utilization(per_s[1])
        stages_of: dict[int, list[StageUsage]] = {}
        for rank, usage in zip((rank for ranks in placement for rank in ranks), usages, strict=True):
            stages_of.setdefault(rank, []).append(usage)
        ranks = [StageUsage.of_rank(own) for own in stages_of.values()]
        losses = [loss for loss in (*metrics.past.losses, *metrics.losses) if isfinite(loss)]
        few = averaged_losses(len(losses))
        evaluated = [found.loss for found in metrics.evaluations][-1:]
        return cls(
            ranks=len(ranks), steps=steps, steps_done=metrics.steps, samples_per_step=size.samples,
            skipped=metrics.skipped, time_s=metrics.time_s - metrics.past.time_s, counted_steps=len(counted),
            samples_per_s=per_s[0], tokens_per_s=per_s[1], step_median_s=median(counted),
            step_p95_s=p95(counted), peak=None if efficiency is None else efficiency.peak,
            mfu=None if used is None else used.model, hfu=None if used is None else used.hardware,
            bubble=finite(bubble((rank.idle_s, rank.working_s) for rank in ranks)),
            memory_bytes=max(usage.peak_memory_bytes for usage in usages),
            sent_bytes=sum(rank.bytes_sent for rank in ranks) / usage_steps,
            versions=max(usage.versions for usage in usages), staleness=max(usage.staleness for usage in usages),
            mean_delay=mean_delay,
            first_loss=fmean(losses[:few]) if losses else None, last_loss=fmean(losses[-few:]) if losses else None,
            evaluation_loss=evaluated[0] if evaluated and isfinite(evaluated[0]) else None,
            doubt=None if efficiency is None or used is None else efficiency.warning(used), stages=tuple(usages),
            usage_steps=usage_steps)

    def as_json(self) -> dict[str, Any]:
        """Return :meth:`as_row` and the stages, as values for JSON."""
        return {**self.as_row(), "usage_steps": self.usage_steps, "stages": [
            {**asdict(usage), "idle_s": finite(usage.idle_s)} for usage in self.stages]}

    def as_row(self) -> dict[str, float | str | None]:
        """Return the figures by name, one value each; times in seconds, sizes in bytes."""
        row = {field.name: _short(getattr(self, field.name)) for field in fields(self)
               if field.name not in ("peak", "stages", "usage_steps")}
        peak = self.peak
        return row | {"peak_tflops": peak and _short(peak.tflops), "devices": peak and peak.devices,
                      "peak_is": peak and str(peak)}


def _short(value: Any) -> Any:
    """Round a number to six digits; the others are noise."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def figure_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a row as text, by column title."""
    return {"samples/s": f"{row['samples_per_s']:,.1f}", "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "median": milliseconds(row["step_median_s"]), "p95": milliseconds(row["step_p95_s"]),
            "MFU": share_text(row["mfu"]), "HFU": share_text(row["hfu"]), "bubble": share_text(row["bubble"]),
            "memory": size_text(row["memory_bytes"]), "sent": size_text(row["sent_bytes"])}
