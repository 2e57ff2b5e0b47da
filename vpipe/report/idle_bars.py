"""Draw the ranks' work and idle time as bars, and the stages' times as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate

from vpipe.plan.plan import Prediction
from vpipe.report.figures import Figures, RankTime
from vpipe.report.idle_causes import Cause
from vpipe.report.report_data import ReportData
from vpipe.report.style import FILLS
from vpipe.report.timeline import swatch
from vpipe.schedules.kinds import kind_with
from vpipe.units import size_text
from vpipe.visualize.table import milliseconds, percent, row_name

_NAMES = {"compute": "forward and backward", "step": "optimizer step", "comm": "handing over"}
_COMPUTE_FILL, _STEP_FILL = kind_with("uses_version").colour, kind_with("makes_version").colour


def _shares(time: RankTime, steps: int) -> list[tuple[str, str, float]]:
    """Return (name, fill, seconds per step) of each part of a rank's time."""
    compute, step = time.compute, time.update
    handing = sum(time.work.values()) - compute - step
    parts = [(_NAMES["compute"], _COMPUTE_FILL, compute), (_NAMES["step"], _STEP_FILL, step),
             (_NAMES["comm"], "var(--comm)", handing),
             *((f"idle: {cause.value}", FILLS[cause], time.idle.get(cause, 0.0)) for cause in Cause)]
    return [(name, fill, seconds / max(1, steps)) for name, fill, seconds in parts if seconds > 0]


def idle_bars(data: ReportData, unit: str) -> str:
    """Return a pair of bars per rank, planned above run, and their numbers as a table."""
    pairs = [("run", data.figures, 20)]
    if data.expected is not None:
        pairs.insert(0, ("medians" if data.expected.prediction is None else "planned", data.expected.figures, 10))
    longest = max(time.span / max(1, figures.window.steps) for _, figures, _ in pairs for time in figures.ranks)
    legend: dict[str, str] = {}
    rows = []
    for time in data.figures.ranks:
        for name, figures, height in pairs:
            parts = _shares(figures.ranks[time.rank], figures.window.steps)
            legend |= {what: fill for what, fill, _ in parts}
            label = f"{row_name(data.recording.placement, time.rank)}, " if name == pairs[0][0] else ""
            rows.append(f'<tr><th scope="row">{escape(label)}{name}</th><td>{_bar(parts, longest, height)}</td></tr>')
    order = [*_NAMES.values(), *(f"idle: {cause.value}" for cause in Cause)]
    keys = "".join(swatch([legend[name]], name) for name in order if name in legend)
    return (f'<figure><ul class="bar">{keys}</ul><table class="bars" aria-label="time per {unit} of each rank">'
            f'{"".join(rows)}</table></figure>{_numbers(data, pairs, unit)}')


def _bar(parts: Sequence[tuple[str, str, float]], longest: float, height: int) -> str:
    at, cells = 0.0, []
    for name, fill, seconds in parts:
        width = 100 * seconds / longest
        cells.append(f'<rect x="{at:.3f}%" width="{width:.3f}%" height="{height}" style="fill:{fill}">'
                     f"<title>{escape(name)}: {milliseconds(seconds)}</title></rect>")
        at += width
    title = ", ".join(f"{name} {milliseconds(seconds)}" for name, _, seconds in parts)
    return f'<svg width="100%" height="{height}" role="img"><title>{escape(title)}</title>{"".join(cells)}</svg>'


def _numbers(data: ReportData, pairs: Sequence[tuple[str, Figures, int]], unit: str) -> str:
    causes = [cause for cause in Cause
              if any(time.idle.get(cause) for _, figures, _ in pairs for time in figures.ranks)]
    head = ["rank", "", *_NAMES.values(), *(cause.value for cause in causes), "idle in all", "busy"]
    rows = []
    for time in data.figures.ranks:
        for name, figures, _ in pairs:
            own, steps = figures.ranks[time.rank], max(1, figures.window.steps)
            shares = {what: seconds for what, _, seconds in _shares(own, steps)}
            idle = sum(own.idle.values())
            cells = [*(shares.get(what, 0.0) for what in _NAMES.values()),
                     *(own.idle.get(cause, 0.0) / steps for cause in causes), idle / steps]
            busy = 1 - idle / own.span if own.span else 0.0
            rows.append(f'<tr><th scope="row">{row_name(data.recording.placement, time.rank)}</th><td>{name}</td>'
                        + "".join(f"<td>{milliseconds(cell)}</td>" for cell in cells)
                        + f"<td>{percent(busy)}</td></tr>")
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return (f"<details><summary>The numbers, per {unit}</summary>"
            f'<div class="wide" tabindex="0" role="region" aria-label="idle by cause"><table><thead><tr>{heads}</tr>'
            f'</thead><tbody>{"".join(rows)}</tbody></table></div></details>')


def stage_table(data: ReportData, unit: str) -> str:
    """Return a row per stage: as it ran, and below in small letters as it was predicted."""
    return (f'<div class="wide" tabindex="0" role="region" aria-label="stages"><table>'
            f'{"".join(_stage_rows(data, unit))}</table></div>')


def _stage_rows(data: ReportData, unit: str) -> Iterator[str]:
    recording, run, expected = data.recording, data.figures, data.expected
    halves = any(stage.weight_s for stage in run.stages)
    heads = {"forward_s": ("forward", "per microbatch"),
             "backward_s": ("input half" if halves else "backward", "per microbatch")}
    if halves:
        heads["weight_s"] = "weight half", "per microbatch"
    if any(stage.recompute_s for stage in run.stages):
        heads["recompute_s"] = "recompute", "per microbatch"
    heads |= {"update_s": ("optimizer step", ""), "transfers_s": ("transfers", f"per {unit}"),
              "idle_s": ("other idle", f"per {unit}")}
    yield '<thead><tr><th scope="col">stage</th><th scope="col">layers</th><th scope="col">rank</th>'
    for name, per in heads.values():
        yield f'<th scope="col">{name}<br>{per}</th>'
    yield '<th scope="col">kept tensors<br>of the rank</th><th scope="col">staleness</th></tr></thead><tbody>'
    ends = list(accumulate(recording.partition))
    slowest = min(range(len(run.stages)), key=lambda stage: run.stages[stage].idle_s)
    prediction = None if expected is None else expected.prediction
    for stage, measured in enumerate(run.stages):
        first = ends[stage] - recording.partition[stage]
        ranks = ", ".join(map(str, recording.placement[stage]))
        again_here = f"<small>{len(recording.recomputed[stage])} recomputed</small>" * bool(recording.recomputed[stage])
        yield (f'<tr{" class=slow" * (stage == slowest)}><th scope="row">{stage}</th>'
               f"<td>{first}–{ends[stage] - 1}{again_here}</td><td>{ranks}</td>")
        for time in heads:
            seconds, below = getattr(measured, time), ""
            # A replay at the run's own medians says nothing new of the other times.
            if expected is not None and (prediction is not None or time in ("transfers_s", "idle_s")):
                below = _beside(getattr(expected.figures.stages[stage], time), seconds)
            yield f"<td{' class=hot' * (time == 'idle_s')}>{milliseconds(seconds)}{below}</td>"
        yield f"<td>{_memory(measured.kept_bytes, prediction, recording.placement, stage)}</td>"
        mean = f"<small>mean {measured.mean_delay:.3g}</small>" * bool(measured.staleness)
        yield f"<td>{measured.staleness}{mean}</td></tr>"
    yield "</tbody>"


def _beside(planned: float, measured: float) -> str:
    """Return the planned time, and how far the run is from it."""
    if planned <= 0:
        return f"<small>{milliseconds(planned)}</small>"
    apart = measured / planned - 1
    text = f" ({apart * 100:+.0f} %)" if abs(apart) < 5 else ""
    return f"<small>{milliseconds(planned)}{text}</small>"


def _memory(measured: float | None, prediction: Prediction | None, placement: Sequence[Sequence[int]],
            stage: int) -> str:
    text = "–" if measured is None else size_text(measured)
    if prediction is None:
        return text
    # Of the rank, as it was measured: all of its stages, without what a backward needs for a while.
    rank = placement[stage][0]
    planned = sum(one.memory.peak - one.memory.working for one in prediction.stages if rank in one.ranks)
    apart = f" ({(measured / planned - 1) * 100:+.0f} %)" if measured is not None and planned else ""
    return f"{text}<small>{size_text(planned)}{apart}</small>"
