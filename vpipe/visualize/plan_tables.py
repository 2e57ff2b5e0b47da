"""Lay out a plan's predictions as tables: times and memory of each stage, and a comparison with other plans."""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.solver.request import Alternative
from vpipe.plan.stage_costs import StageMemory, combined_memory
from vpipe.units import size_text
from vpipe.visualize.table import Column, columns, filled, listed, ms_text

BAR = 20
"""Columns of a bar."""

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_KINDS = ("weights", "stashed", "gradients", "optimizer", "activations", "working")


def times_table(plan: Plan, width: int) -> list[str]:
    """Return a row per stage: milliseconds of one microbatch, then of one rank in a step."""
    found = predicted(plan)
    stages = found.stages
    again = [len(layers) for layers in plan.recomputed]
    busy = [1 - stage.idle_s / found.step_s for stage in stages]
    return columns([
        *_named(plan, stages),
        Column("forward", [ms_text(stage.forward_s) for stage in stages]),
        Column("backward", [ms_text(stage.backward_s) for stage in stages]),
        Column("recompute", [f"{ms_text(stage.recompute_s)} ({count} of {stage.layers})" if count else "-"
                             for stage, count in zip(stages, again, strict=True)]),
        Column("step", [ms_text(stage.step_s) for stage in stages]),
        Column("comm", [ms_text(stage.communication_s) for stage in stages]),
        Column("idle", [ms_text(stage.idle_s) for stage in stages]),
        Column("busy", [f"{100 * share:.0f} %" for share in busy], spare=True),
        Column("", [bar(share) for share in busy], spare=True)], width)


def memory_table(plan: Plan, limit_bytes: int | None, width: int) -> list[str]:
    """Return a row per stage, or per group of stages that share ranks: the memory of one of its ranks at its peak."""
    groups = stages_by_ranks(plan)
    sums = [rank_memory(plan, group) for group in groups]
    peaks = [memory.peak for memory in sums]
    unit = next((name for name in reversed(_UNITS) if max(peaks) >= 10 * _UNITS[name]), "KiB")
    cells = {kind: [_in(unit, getattr(memory, kind)) for memory in sums] for kind in (*_KINDS, "peak")}
    shares = [peak / (limit_bytes or max(peaks)) for peak in peaks]
    of_limit = Column("of limit", [f"{100 * share:.0f} %" for share in shares], spare=True)
    lines = columns([
        Column("stage" if all(len(group) == 1 for group in groups) else "stages",
               [listed(group) for group in groups]),
        *(Column(kind, cells[kind]) for kind in _KINDS), Column("peak", cells["peak"]),
        *([] if limit_bytes is None else [of_limit]), Column("", [bar(share) for share in shares], spare=True)], width)
    return [f"memory of a rank when it holds most, in {unit}", *lines]


def stages_by_ranks(plan: Plan) -> list[list[int]]:
    """Group stages by the ranks that hold them, in order of the first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(predicted(plan).stages):
        groups.setdefault(tuple(sorted(stage.ranks)), []).append(number)
    return list(groups.values())


def rank_memory(plan: Plan, stages: Sequence[int]) -> StageMemory:
    """Return the memory of a rank when each of its stages holds most; it works on one at a time."""
    return combined_memory([predicted(plan).stages[stage].memory for stage in stages])


def peak_bytes(plan: Plan) -> int:
    """Return the bytes of the rank that holds most."""
    return max(rank_memory(plan, group).peak for group in stages_by_ranks(plan))


def alternatives_table(best: Plan, others: Sequence[Alternative], width: int) -> list[str]:
    """Return the plan and others, by samples per second; below them those that are impossible, with the reason."""
    rate = 1 / predicted(best).seconds_per_sample
    rows = [("this plan", best, rate, True)]
    rows += [(other.what, other.plan, 1 / other.seconds_per_sample, other.simulated) for other in others
             if other.plan is not None and other.seconds_per_sample is not None]
    plans = [plan for _, plan, _, _ in rows]
    lines = columns([
        Column("", [what for what, _, _, _ in rows], left=True),
        Column("schedule", [plan.schedule or "" for plan in plans], left=True),
        Column("layers per stage", [cut_text(plan.partition, 24) for plan in plans], left=True),
        *([Column("replicas", [_widths_text(plan) for plan in plans])] if any(max(_widths(plan)) > 1 for plan in plans)
          else []),
        Column("m", [str(plan.microbatches) for plan in plans]),
        Column("recompute", [_recomputed_share(plan) for plan in plans]),
        Column("samples/s", [("" if simulated else "~") + rate_text(value) for _, _, value, simulated in rows]),
        Column("", ["" if plan is best else difference(value, rate) for _, plan, value, _ in rows]),
        Column("peak", [size_text(peak_bytes(plan)) if plan.predictions else "" for plan in plans], spare=True)], width)
    if not all(simulated for _, _, _, simulated in rows):
        lines.append("~ by the solver's formula, not simulated")
    reasons: dict[str, list[str]] = {}
    for other in others:
        if other.plan is None:
            reasons.setdefault(other.why, []).append(other.what)
    return lines + [line for why, names in reasons.items() for line in filled(f"{', '.join(names)}: {why}", width)]


def cut_text(partition: Sequence[int], room: int) -> str:
    """Return ``[2, 2, 2, 3]``; a long one in words."""
    text = str(list(partition))
    if len(text) <= room:
        return text
    low, high = min(partition), max(partition)
    return f"{len(partition)} stages of {low}" + (f"-{high}" if low < high else "")


def _widths(plan: Plan) -> list[int]:
    """Return the replicas per stage."""
    return [len(ranks) for ranks in plan.stage_to_rank_map] or [1]


def _widths_text(plan: Plan) -> str:
    widths = _widths(plan)
    if len(set(widths)) == 1:
        return "-" if widths[0] == 1 else f"{widths[0]} each" if len(widths) > 1 else str(widths[0])
    return "-".join(map(str, widths)) if len(widths) <= 8 else f"{min(widths)} to {max(widths)}"


def rate_text(per_s: float) -> str:
    """Return samples per second in three digits."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def difference(value: float, of: float) -> str:
    """Return ``+4.2 %``."""
    percent = 100 * (value / of - 1)
    return "same" if abs(percent) < 0.05 else f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def bar(share: float) -> str:
    """Return ``##########..........``."""
    full = round(BAR * min(1.0, max(0.0, share)))
    return "#" * full + "." * (BAR - full)


def _named(plan: Plan, stages: Sequence[StagePrediction]) -> list[Column]:
    last = [stage.first_layer + stage.layers - 1 for stage in stages]
    return [Column("stage", [str(number) for number in range(len(stages))]),
            Column("layers", [f"{stage.first_layer}-{end}" if stage.layers > 1 else str(end)
                              for stage, end in zip(stages, last, strict=True)]),
            Column("ranks" if any(len(stage.ranks) > 1 for stage in stages) else "rank",
                   [_span(stage.ranks) for stage in stages])]


def _span(numbers: Sequence[int]) -> str:
    """Return ``0-3`` for ranks in a row."""
    first, last = numbers[0], numbers[-1]
    in_a_row = list(numbers) == list(range(first, last + 1)) and last > first + 1
    return f"{first}-{last}" if in_a_row else " ".join(map(str, numbers))


def _recomputed_share(plan: Plan) -> str:
    count = sum(map(len, plan.recomputed))
    return f"{count} of {sum(plan.partition)}" if count else "-"


def predicted(plan: Plan) -> Prediction:
    """Return the predictions of a plan that has them."""
    assert plan.predictions is not None, "only a plan with predictions is explained"
    return plan.predictions


def _in(unit: str, size: int) -> str:
    value = size / _UNITS[unit]
    return "0" if not size else f"{value:,.0f}" if value >= 999.5 else f"{value:.1f}"
