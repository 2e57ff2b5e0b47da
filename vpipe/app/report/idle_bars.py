"""Tabulate the ranks' work and idle time, also as bars, and the stages' times."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from vpipe.app.report.figures import RankTime
from vpipe.app.report.idle_causes import Cause
from vpipe.app.report.report_data import ReportData
from vpipe.app.report.style import FILLS, render
from vpipe.app.visualize.table import milliseconds, percent, row_name
from vpipe.schedules import kinds
from vpipe.units import size_text

_IDLE = {f"idle: {cause.value}": cause for cause in Cause}
_WORK = {"forward and backward": kinds.having("uses_version").colour,
         "optimizer step": kinds.having("makes_version").colour,
         "other actions": "var(--plan)", "handing over": "var(--comm)"}
_FILLS = _WORK | {name: FILLS[cause] for name, cause in _IDLE.items()}


def idle_bars(data: ReportData, unit: str) -> str:
    """Return a pair of bars per rank, planned above run, and their numbers as a table; HTML."""
    pairs = [("run", data.figures, 20)]
    if data.expected is not None:
        pairs.insert(0, ("medians" if data.expected.plan is None else "planned", data.expected.figures, 10))
    times = [(name, height, max(1, figures.window.steps), figures.ranks[time.rank])
             for time in data.figures.ranks for name, figures, height in pairs]
    longest = max(time.whole / steps for _, _, steps, time in times)
    shown = {name for _, _, steps, time in times for name, seconds in _parts(time, steps).items() if seconds > 0}
    columns = [name for name in _FILLS if (name in _WORK and name != "other actions") or name in shown]
    rows = []
    for name, height, steps, time in times:
        parts, idle = _parts(time, steps), sum(time.idle.values())
        cells = [*(milliseconds(max(0.0, parts[column])) for column in columns), milliseconds(idle / steps),
                 percent(1 - idle / time.whole if time.whole else 0.0)]
        rows.append((row_name(data.recording.placement, time.rank), name, height, list(_along(parts, longest)), cells))
    return render("idle_bars.html", unit=unit, rows=rows, runs=len(pairs), legend={
        name: fill for name, fill in _FILLS.items() if name in shown}, columns=columns)


def _parts(time: RankTime, steps: int) -> dict[str, float]:
    """Return the seconds per step of each part of a rank's time."""
    handing = sum(time.work.values()) - time.compute - time.update - time.others
    work = dict(zip(_WORK, (time.compute, time.update, time.others, handing), strict=True))
    idle = {name: time.idle.get(cause, 0.0) for name, cause in _IDLE.items()}
    return {name: seconds / steps for name, seconds in (work | idle).items()}


def _along(parts: dict[str, float], longest: float) -> Iterator[tuple[str, str, float, float, str]]:
    """Yield the parts of a bar, one after the other."""
    at = 0.0
    for name, seconds in parts.items():
        if seconds > 0:
            width = 100 * seconds / longest
            yield name, _FILLS[name], at, width, milliseconds(seconds)
            at += width


def stage_table(data: ReportData, unit: str) -> str:
    """Return a row per stage: as it ran, and below in small letters as it was predicted; HTML."""
    recording, run, expected = data.recording, data.figures, data.expected
    halves = any(stage.weight_s for stage in run.stages)
    each = "per microbatch" if recording.slices == 1 else "per slice"
    heads = {"forward_s": ("forward", each), "backward_s": ("input half" if halves else "backward", each)}
    if halves:
        heads["weight_s"] = "weight half", each
    if any(stage.recompute_s for stage in run.stages):
        heads["recompute_s"] = "recompute", each
    heads["update_s"] = "optimizer step", ""
    if any(stage.others_s for stage in run.stages):
        heads["others_s"] = "other actions", f"per {unit}"
    heads |= {"transfers_s": ("transfers", f"per {unit}"), "idle_s": ("other idle", f"per {unit}")}
    rows = []
    for number, (stage, end) in enumerate(zip(run.stages, accumulate(recording.partition), strict=True)):
        times = []
        for time in heads:
            seconds, below = getattr(stage, time), ""
            # A replay at the run's own medians says nothing new of those of a microbatch and of the optimizer step.
            if expected is not None and (expected.plan is not None or heads[time][1] == f"per {unit}"):
                below = _beside(getattr(expected.figures.stages[number], time), seconds)
            times.append((milliseconds(seconds), below))
        rows.append((f"{end - recording.partition[number]}–{end - 1}", len(recording.recomputed[number]),
                     recording.placement[number], times, _memory(data, number), stage))
    return render("stage_table.html", heads=heads.values(), rows=rows,
                  slowest=min(range(len(run.stages)), key=lambda number: run.stages[number].idle_s))


def _beside(planned: float, measured: float) -> str:
    """Return the planned time, and how far the run is from it."""
    apart = measured / planned - 1 if planned > 0 else 5.0
    return milliseconds(planned) + (f" ({apart * 100:+.0f} %)" if abs(apart) < 5 else "")


def _memory(data: ReportData, stage: int) -> tuple[str, str]:
    """Return the bytes that a stage's rank kept, and below those of its prediction."""
    measured = data.figures.stages[stage].kept_bytes
    text = "–" if measured is None else size_text(measured)
    if data.expected is None or data.expected.plan is None:
        return text, ""
    # Of the rank, as it was measured: all of its stages, without what a backward needs for a while.
    rank = data.recording.placement[stage][0]
    planned = sum(one.memory.peak - one.memory.working for one in data.expected.plan.predicted.stages
                  if rank in one.ranks)
    apart = f" ({(measured / planned - 1) * 100:+.0f} %)" if measured is not None and planned else ""
    return text, f"{size_text(planned)}{apart}"
