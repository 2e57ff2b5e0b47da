"""Explain a plan in tables: its times and memory by stage, and why each other candidate lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vpipe import Plan
from vpipe.app.visualize.table import Column, columns, compact, filled, grouped, listed, milliseconds, ms_text
from vpipe.errors import counted
from vpipe.plan import Profile
from vpipe.schedules import RegisteredSchedule, Schedule, build, delays
from vpipe.units import size_text

_KINDS = ("weights", "stashed", "gradients", "optimizer", "activations", "working")
"""Columns of the memory's table: fields of :class:`~vpipe.plan.stage_costs.StageMemory`."""

_TIMES = {"forward": "forward_s", "backward": "backward_s", "step": "step_s", "comm": "communication_s",
          "idle": "idle_s"}
"""Columns of the times' table, and their fields of :class:`~vpipe.plan.plan.StagePrediction`."""

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class OtherPlan:
    """A plan to compare with, or why there is none."""

    what: str  # distinguishes it, such as schedule gpipe
    plan: Plan | None = None
    seconds_per_sample: float | None = None  # predicted
    simulated: bool = True  # else that is the solver's formula, which is coarser
    why: str = ""  # none is possible
    note: str = ""  # what else must be known of it

    @classmethod
    def simulated_one(cls, what: str, plan: Plan, note: str = "") -> OtherPlan:
        """Return a plan with predictions."""
        return cls(what, plan, plan.predicted.seconds_per_sample, note=note)


@dataclass(frozen=True)
class PlanExplanation:
    """A plan with predictions, the profile that it was made from, and the candidates that lost.

    Attributes:
        limit_bytes: that a rank may hold; None without a limit.
        limit_from: the origin of the limit, such as ``--memory``.
        solver: a text on how good the plan is.
        others: plans to compare with.
    """

    plan: Plan
    profile: Profile
    limit_bytes: int | None
    limit_from: str
    solver: str
    others: Sequence[OtherPlan]

    def text(self, width: int) -> str:
        """Return the explanation in lines of ``width``; a table without columns to spare may be wider."""
        parts = [self._headline(),
                 [f"in ms: of a microbatch, of a step of the optimizer; comm and idle per {self._step_name}",
                  *times_table(self.plan, self._delays(), width)],
                 memory_table(self.plan, self.limit_bytes, width),
                 filled(f"solver: {self.solver}", width),
                 candidates_table(self.plan, self.others, self.limit_bytes, width)]
        return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

    def _headline(self) -> list[str]:
        plan, identity, found = self.plan, self.profile.identity, self.plan.predicted
        tensor, microbatches = identity.tensor, found.samples_per_step // identity.microbatch_size
        limit = "" if self.limit_bytes is None else f" of {size_text(self.limit_bytes)} ({self.limit_from})"
        cores, together = self.profile.cores, min(identity.ranks_per_host, plan.ranks)
        shared = "" if cores is None or cores >= together else (
            f"; {together * tensor} ranks of a host share {counted(cores * tensor, 'core')}")
        shares = plan.zero1 and any(len(ranks) > 1 for ranks in plan.groups)
        slices = f" in {plan.order.slices} slices" * ((plan.order.slices or 1) > 1)
        return [f"{identity.model_name}: {counted(identity.layers, 'layer')} on "
                f"{counted(plan.ranks * tensor, 'rank')}{limit}{shared}",
                f"plan: {plan.schedule}, {counted(len(plan.partition), 'stage')} {cut_text(plan.partition, 60)}, "
                + (f"tensor {tensor}, " if tensor > 1 else "") + ("zero1, " if shares else "")
                + f"{counted(microbatches, 'microbatch')}{slices} of "
                f"{counted(identity.microbatch_size, 'sample')} per {self._step_name}{ahead_text(plan)}",
                f"predicted: {milliseconds(found.step_s)} per {self._step_name}, "
                f"{compact(1 / found.seconds_per_sample)} samples/s, bubble {100 * found.bubble:.0f} %"]

    @property
    def _step_name(self) -> str:
        widths = {len(stage.ranks) for stage in self.plan.predicted.stages}
        return "update" if len(widths) == 1 or RegisteredSchedule.named(self.plan.schedule or "").flush else "step"

    def _delays(self) -> list[float]:
        """Return the mean delay of the gradients of every stage in updates; none with a flush."""
        plan = self.plan
        if RegisteredSchedule.named(plan.schedule or "").flush:
            return []
        schedule = build(plan.schedule or "", plan.groups, plan.predicted.samples_per_step
                         // self.profile.identity.microbatch_size, plan.update_every, warmup=plan.warmup)
        return [delays.mean_delay(schedule, stage) for stage in range(schedule.stages)]


def ahead_text(plan: Plan) -> str:
    """Return in words how many forwards every stage does before its first backward; nothing where that is as in 1F1B.
    """
    if plan.warmup in (None, Schedule.default_warmup(list(map(len, plan.groups)))):
        return ""
    return "; before its first backward " + ", ".join(
        f"stage {stage} runs {counted(depth, 'forward') if depth else 'none'}" if not stage else
        f"stage {stage} {depth or 'none'}" for stage, depth in enumerate(plan.warmup or ()))


def times_table(plan: Plan, late: Sequence[float], width: int) -> list[str]:
    """Return a row per stage: milliseconds of one microbatch, then of one rank in a step.

    Args:
        late: mean delay of the gradients of every stage, in updates; none with a flush.
    """
    found = plan.predicted
    stages = found.stages
    again = [len(layers) for layers in plan.recomputed]
    times = [Column(head, [ms_text(getattr(stage, field)) for stage in stages]) for head, field in _TIMES.items()]
    return columns([
        Column("stage", [str(number) for number in range(len(stages))]),
        Column("layers", [_span(range(stage.first_layer, stage.first_layer + stage.layers)) for stage in stages]),
        Column("ranks" if any(len(stage.ranks) > 1 for stage in stages) else "rank",
               [_span(stage.ranks) for stage in stages]),
        *times[:2],
        Column("recompute", [f"{ms_text(stage.recompute_s)} ({count} of {stage.layers})" if count else "-"
                             for stage, count in zip(stages, again, strict=True)]),
        *times[2:],
        Column("busy", [f"{100 * (1 - stage.idle_s / found.step_s):.0f} %" for stage in stages], spare=True),
        *([Column("late", [f"{delay:.3g}" for delay in late])] if any(late) else [])], width)


def memory_table(plan: Plan, limit_bytes: int | None, width: int) -> list[str]:
    """Return a row per stage, or per group of stages that share ranks: the memory of one of its ranks at its peak.

    A rank with several stages works on one at a time.
    """
    stages = plan.predicted.stages
    groups = list(grouped(range(len(stages)), lambda number: tuple(sorted(stages[number].ranks))).values())
    sums = [plan.predicted.held_by(group) for group in groups]
    process = plan.predicted.process_bytes
    peaks = [plan.predicted.taken_bytes(memory.peak) for memory in sums]
    kept = [peak - process - memory.peak for peak, memory in zip(peaks, sums, strict=True)]
    unit = next((name for name in reversed(_UNITS) if max(peaks) >= 10 * _UNITS[name]), "KiB")
    lines = columns([
        Column("stage" if all(len(group) == 1 for group in groups) else "stages",
               [listed(group) for group in groups]),
        *(Column(kind, [_in_unit(getattr(memory, kind) / _UNITS[unit]) for memory in sums]) for kind in _KINDS),
        *(Column(head, [_in_unit(size / _UNITS[unit]) for size in sizes]) for head, sizes in (
            ("unused", kept), ("process", [process] * len(sums)), ("peak", peaks))
          if head == "peak" or any(sizes)),
        *([] if limit_bytes is None else [
            Column("of limit", [f"{100 * peak / limit_bytes:.0f} %" for peak in peaks], spare=True)])], width)
    return [f"memory of a rank when it holds most, in {unit}", *lines]


def _in_unit(value: float) -> str:
    return "0" if not value else f"{value:,.0f}" if value >= 999.5 else f"{value:.1f}"


def candidates_table(best: Plan, others: Sequence[OtherPlan], limit_bytes: int | None, width: int) -> list[str]:
    """Return the plan and others, with the reason that each lost; those that are impossible below, by their reason."""
    found = [(one, one.plan) for one in (OtherPlan.simulated_one("this plan", best), *others) if one.plan is not None]
    plans = [plan for _, plan in found]
    replicas = [_replicas_text(plan) for plan in plans]
    lines = columns([
        Column("candidate", [other.what for other, _ in found], left=True),
        Column("schedule", [plan.schedule or "" for plan in plans], left=True),
        Column("layers per stage", [cut_text(plan.partition, 24) for plan in plans], left=True),
        *([Column("replicas", replicas)] if set(replicas) != {"-"} else []),
        Column("m", [str(plan.microbatches) for plan in plans]),
        Column("recompute", [f"{count} of {sum(plan.partition)}" if (count := sum(map(len, plan.recomputed))) else "-"
                             for plan in plans]),
        Column("samples/s", ["" if other.seconds_per_sample is None else compact(1 / other.seconds_per_sample)
                             for other, _ in found]),
        Column("lost by", ["", *(_lost_by(best, other, limit_bytes) for other, _ in found[1:])], left=True),
        Column("peak", [size_text(plan.predictions.fullest_rank[1]) if plan.predictions else "" for plan in plans],
               spare=True)], width)
    reasons = grouped((other for other in others if other.plan is None), lambda other: other.why)
    texts = [f"{', '.join(other.what for other in same)}: {why}" for why, same in reasons.items()]
    texts += [other.note for other in others]
    return lines + [line for text in texts for line in filled(text, width)]


def _lost_by(best: Plan, other: OtherPlan, limit_bytes: int | None) -> str:
    """Return ``4.2 % slower``, ``by formula`` where that is not simulated; or why a plan that is faster lost."""
    if other.plan is None or other.seconds_per_sample is None:
        return ""
    percent = 100 * (1 - best.predicted.seconds_per_sample / other.seconds_per_sample)
    if abs(percent) < 0.05:
        return "nothing"
    size = f"{abs(percent):.{1 if abs(percent) < 10 else 0}f} %"
    if percent > 0:
        return f"{size} slower" + " by formula" * (not other.simulated)
    peak = other.plan.predictions.fullest_rank[1] if other.plan.predictions else 0
    if other.note:
        return f"{size} faster, another batch"
    return f"{size} faster, " + ("too little" if limit_bytes is None or peak <= limit_bytes else "does not fit")


def cut_text(partition: Sequence[int], room: int) -> str:
    """Return ``[2, 2, 2, 3]``; a long one in words."""
    text = str(list(partition))
    if len(text) <= room:
        return text
    low, high = min(partition), max(partition)
    return f"{len(partition)} stages of {low}" + (f"-{high}" if low < high else "")


def _replicas_text(plan: Plan) -> str:
    """Return ``-``, ``2 each``, ``2 1 1``; ``2 copies`` where the schedule places copies of every stage by itself."""
    copies = plan.copies
    widths = [len(ranks) // copies for ranks in plan.groups]
    text = listed(widths)
    if len(set(widths)) == 1:
        text = "-" if widths[0] == 1 else f"{widths[0]} each" if len(widths) > 1 else str(widths[0])
    return text if copies < 2 else f"{text}, {copies} copies".removeprefix("-, ")


def _span(numbers: Sequence[int]) -> str:
    """Return ``0-3`` for numbers in a row."""
    first, last = numbers[0], numbers[-1]
    in_a_row = list(numbers) == list(range(first, last + 1)) and last > first
    return f"{first}-{last}" if in_a_row else " ".join(map(str, numbers))
