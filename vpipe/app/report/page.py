"""Write ``RUN/report.html``: one self-contained page of what happened in a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from statistics import fmean
from typing import Any

from vpipe.app.metric_formulas import averaged_losses, perplexity, share_text
from vpipe.app.report.figures import Points, RankTime, in_window, steady_window, typical_window
from vpipe.app.report.idle_causes import Cause
from vpipe.app.report.line_chart import Line, chart, is_drawable, render, thinned
from vpipe.app.report.report_data import ReportData
from vpipe.app.report.timeline import FILLS, Lane, TimelineFigure, shades_of, stages_per_rank
from vpipe.app.sizes import parse_size
from vpipe.app.visualize.table import compact, milliseconds, percent, row_name
from vpipe.errors import counted
from vpipe.schedules import kinds
from vpipe.units import size_text

_DRAWN, _FEWEST, _MOST = 800, 32, 48  # actions of all ranks together and of a rank, in each timeline
_MOST_CURVES = 16
_SMOOTHED = 40  # points of a smoothed line, each the mean of a fortieth of the run


def page(data: ReportData) -> str:
    """Return the page as HTML."""
    found, runs = _Page(data), [data.recording] if data.expected is None else [data.recording, data.expected.recording]
    ops = {done.op for run in runs for track in run.tracks for done in track.actions}
    model = [_at(data.config, "model", key) for key in ("name", "preset")]
    return render("page.html", page=found, data=data, unit=found.unit, counted=counted,
                  model=" ".join(str(part) for part in model if part),
                  shades=shades_of(ops, stages_per_rank(data.recording)),
                  timeline=TimelineFigure(found.lanes, found.unit).html(),
                  idle_bars=idle_bars(data, found.unit), stage_table=stage_table(data, found.unit),
                  progress=list(found.progress()), memory=found.memory())


class _Page:
    """The words, figures and charts of the page."""

    def __init__(self, data: ReportData) -> None:
        self._data, self._run = data, data.recording
        assignment, expected = self._run.dependencies.assignment, data.expected
        whole = all(assignment.per_update(stage) == assignment.per_step for stage in range(len(self._run.placement)))
        self.unit = "update" if whole else "step"
        # A window of the run and one of the expected run, with equally many steps.
        most = min(max(_FEWEST, _DRAWN // len(self._run.tracks)), _MOST)
        ran = typical_window(self._run, most)
        if expected is not None:
            steps = min(ran.steps, max(1, steady_window(expected.recording).steps))
            if steps < ran.steps:
                ran = typical_window(self._run, most, steps)
        self.lanes = [Lane("As run", self._run, data.producers, ran)]
        if expected is not None:
            self.lanes.insert(0, Lane("As planned" if expected.plan is not None else "At medians",
                                      expected.recording, expected.producers,
                                      typical_window(expected.recording, most, ran.steps)))

    def headlines(self) -> Iterator[tuple[str, str, str]]:
        data, figures, expected = self._data, self._data.figures, self._data.expected
        history, unit, totals = data.history, self.unit, data.totals
        yield ("samples per second", f"{totals.samples_per_s:,.1f}",
               "" if totals.tokens_per_s in (None, totals.samples_per_s) else f"{totals.tokens_per_s:,.0f} tokens/s")
        against = planned = ""
        if expected is not None:
            replayed, found = expected.plan is None, expected.figures if expected.plan is None else (
                expected.plan.predicted)
            apart = f" ({(totals.step_s / found.step_s - 1) * 100:+.1f} %)" if found.step_s else ""
            against = f"{'at medians' if replayed else 'predicted'} {milliseconds(found.step_s)}{apart}"
            planned = f"{'at medians' if replayed else 'planned'} {share_text(found.bubble)}"
        yield f"median {unit}", milliseconds(totals.step_s), against
        yield "bubble", share_text(totals.bubble), planned
        yield ("MFU", share_text(totals.mfu), "metrics.jsonl has none" if totals.mfu is None else
               f"HFU {share_text(totals.hfu)}" + ("" if totals.peak is None else f", of {totals.peak}"))
        stale = [stage.staleness for stage in figures.stages]
        low, high = min(stale), max(stale)
        mean = max(stage.mean_delay for stage in figures.stages)
        yield ("staleness", f"{low}–{high}" if low != high else str(high),
               f"updates that a gradient was late, by stage; mean up to {mean:.3g}" if high else
               "every backward uses the latest weights")
        if totals.memory_bytes is not None:
            yield "memory", size_text(totals.memory_bytes), "peak of the fullest rank's process, or of its GPU"
        if peaks := figures.kept_bytes:
            worst = max(peaks, key=lambda rank: peaks[rank])
            limit = self._limit
            yield ("kept tensors", size_text(peaks[worst]),
                   f"at most, on rank {worst}" + (f", of {size_text(limit)} allowed" if limit else ""))
        if history.losses:
            few = averaged_losses(len(history.losses))
            after = f"; evaluation {self._loss(history.evaluations[-1:])}" if history.evaluations else ""
            yield ("training loss", _mean(history.losses[-few:]), f"from {_mean(history.losses[:few])}"
                   f"{self._perplexity(history.losses[-few:])}{after}")

    def _loss(self, losses: Points) -> str:
        """Return the mean of losses as text, with the perplexity of a model of next tokens."""
        return _mean(losses) + self._perplexity(losses)

    def _perplexity(self, losses: Points) -> str:
        next_tokens = any("perplexity" in line for line in self._data.history.lines)
        if not next_tokens or not all(is_drawable(loss) for _, loss in losses):
            return ""
        found = perplexity(fmean(loss for _, loss in losses))
        return "" if found is None else f", perplexity {compact(found)}"

    @property
    def _limit(self) -> int | None:
        limit = _at(self._data.config, "parallel", "memory")
        return None if limit is None else parse_size(limit, "parallel.memory")

    def progress(self) -> Iterator[str]:
        """Yield the charts of training."""
        history, unit = self._data.history, self.unit
        if not history.losses:
            return
        yield chart("Loss", [*self._smoothed("training loss", history.losses, "var(--train)"),
                             Line("evaluation loss", history.evaluations, "var(--eval)", "dot")],
                    f"training loss from {self._loss(history.losses[:1])} to {self._loss(history.losses[-1:])}",
                    unit, compact)
        speeds = [(line["time_s"], line["tokens_per_s"]) for line in history.lines]
        yield chart("Throughput", self._smoothed("tokens/s", speeds, "var(--speed)"),
                    f"tokens per second over {speeds[-1][0]:.0f} seconds", "seconds", compact, bottom=0.0)

    def _smoothed(self, name: str, points: Points, colour: str) -> list[Line]:
        if len(points) <= 100:
            return [Line(name, points, colour)]
        return [Line(f"each {self.unit}", thinned(points), colour, "thin"),
                Line(f"{name} (smoothed)", thinned(points, _SMOOTHED), colour)]

    def memory(self) -> tuple[str, list[str]]:
        """Return remarks on the charts of kept tensors, and the charts, of the ranks that hold most."""
        expected, peaks, limit = self._data.expected, self._data.figures.kept_bytes, self._limit
        ran, before = self.lanes[-1].window, self.lanes[0].window
        parts = in_window(self._data.figures.memory, ran)
        planned = in_window({} if expected is None else dict(enumerate(expected.memory)), before)
        ranks = sorted(sorted(parts, key=lambda rank: -peaks[rank])[:_MOST_CURVES])
        end = 1e3 * ran.span_s
        top = max((held for rank in ranks for held in (peaks[rank], *(held for _, held in planned.get(rank, ())))),
                  default=0.0)
        close = limit is not None and limit < 2 * top  # a limit far above would flatten the curves
        charts = []
        for rank in ranks:
            curve = _in_ms(parts[rank], ran.start_s)
            lines = [Line("as run", [*curve, (end, curve[-1][1])] if curve else [], "var(--train)", "area", True)]
            if own := planned.get(rank):
                lines.append(Line("as planned", _in_ms(own, before.start_s), "var(--plan)", "dash", True))
            if close and limit is not None:
                lines.append(Line("limit", [(0.0, limit), (end, limit)], "var(--late)", "dash"))
            if curve:
                charts.append(chart(f"rank {rank}: {size_text(peaks[rank])} at most in the run", lines,
                                    f"up to {size_text(peaks[rank])}", "ms", size_text, height=110, bottom=0.0,
                                    top=top, x_end=end, unit=binary_unit(top)))
        return (("" if limit is None or close else f" The limit of {size_text(limit)} is above the charts.")
                + (f" Of {len(parts)} ranks the {_MOST_CURVES} that hold most." if len(parts) > len(ranks) else ""),
                charts)


def _in_ms(curve: Points, start_s: float) -> list[tuple[float, float]]:
    return [(1e3 * (second - start_s), held) for second, held in curve]


def _mean(losses: Points) -> str:
    """Return the mean of losses as text; "no number" if one of them is none."""
    return f"{fmean(loss for _, loss in losses):.3f}" if all(is_drawable(loss) for _, loss in losses) else "no number"


def binary_unit(size: float) -> float:
    """Return the largest of 1, KiB, MiB, GiB and TiB of which ``size`` has two."""
    return max(unit for unit in (1.0, 1024.0, 1024.0**2, 1024.0**3, 1024.0**4) if unit == 1 or size >= 2 * unit)


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    """Return a value of the config; None where it has none."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


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
        rows.append((row_name(data.recording.placement, time.rank), name, height, parts, cells))
    return render("idle_bars.html", unit=unit, rows=rows, runs=len(pairs), longest=longest, fills=_FILLS,
                  milliseconds=milliseconds, legend={
        name: fill for name, fill in _FILLS.items() if name in shown}, columns=columns)


def _parts(time: RankTime, steps: int) -> dict[str, float]:
    """Return the seconds per step of each part of a rank's time."""
    handing = sum(time.work.values()) - time.compute - time.update - time.others
    work = dict(zip(_WORK, (time.compute, time.update, time.others, handing), strict=True))
    idle = {name: time.idle.get(cause, 0.0) for name, cause in _IDLE.items()}
    return {name: seconds / steps for name, seconds in (work | idle).items()}


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
                below = _planned_text(getattr(expected.figures.stages[number], time), seconds)
            times.append((milliseconds(seconds), below))
        rows.append((f"{end - recording.partition[number]}–{end - 1}", len(recording.recomputed[number]),
                     recording.placement[number], times, _memory(data, number), stage))
    return render("stage_table.html", heads=heads.values(), rows=rows,
                  slowest=min(range(len(run.stages)), key=lambda number: run.stages[number].idle_s))


def _planned_text(planned: float, measured: float) -> str:
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
