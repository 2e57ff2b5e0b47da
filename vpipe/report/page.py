"""Write ``RUN/report.html``: one self-contained page of what happened in a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from statistics import fmean
from typing import Any

from vpipe.errors import counted
from vpipe.metric_formulas import averaged_losses, perplexity, share_text
from vpipe.report.figures import Points, Window, in_window, steady_window, typical_window
from vpipe.report.idle_bars import idle_bars, stage_table
from vpipe.report.line_chart import Line, chart, is_drawable, smooth, thinned
from vpipe.report.report_data import ReportData
from vpipe.report.style import PATTERNS, SCRIPT, css
from vpipe.report.timeline import Lane, chunks, timeline_figure
from vpipe.units import parse_size, size_text
from vpipe.visualize.table import compact, milliseconds

_DRAWN, _FEWEST, _MOST = 800, 32, 48  # actions of all ranks together and of a rank, in each timeline
_MOST_CURVES = 16


def page(data: ReportData) -> str:
    """Return the page as HTML."""
    return "\n".join(_Page(data).parts()) + "\n"


class _Page:
    def __init__(self, data: ReportData) -> None:
        self._data, self._run = data, data.recording
        rounds = self._run.rounds
        whole = all(rounds.per_update(stage) == rounds.per_step for stage in range(len(self._run.placement)))
        self._unit = "update" if whole else "step"
        self._run_window, self._planned_window = self._windows()

    def _windows(self) -> tuple[Window, Window | None]:
        """Return a window of the run and one of the expected run, with equally many steps."""
        most = min(max(_FEWEST, _DRAWN // len(self._run.tracks)), _MOST)
        ran = typical_window(self._run, most)
        if self._data.expected is None:
            return ran, None
        planned = self._data.expected.recording
        steps = min(ran.steps, max(1, steady_window(planned).steps))
        if steps < ran.steps:
            ran = typical_window(self._run, most, steps)
        return ran, typical_window(planned, most, ran.steps)

    def parts(self) -> Iterator[str]:
        data = self._data
        ops = {done.op for track in self._run.tracks for done in track.actions}
        if data.expected is not None:
            ops |= {done.op for track in data.expected.recording.tracks for done in track.actions}
        title = escape(f"Run {data.name}")
        yield (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
               '<meta name="viewport" content="width=device-width, initial-scale=1">'
               f'<style>{css(ops, chunks(self._run))}</style></head><body>{PATTERNS}<main>')
        yield f'<h1>{title}</h1><p class="soft lead">{escape(self._lead())}</p>'
        yield from self._cards()
        if data.notes:
            yield '<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in data.notes) + "</ul>"
        yield from self._timelines()
        yield from self._idle()
        yield f'<h2>Stages</h2><p class="soft lead">{escape(self._stages_caption())}</p>'
        yield stage_table(data, self._unit)
        yield from self._progress()
        yield from self._memory()
        yield from self._facts()
        yield f"</main><script>{SCRIPT}</script></body></html>"

    def _lead(self) -> str:
        run = self._run
        model = _at(self._data.config, "model", "name")
        preset = _at(self._data.config, "model", "preset")
        name = " ".join(str(part) for part in (model, preset) if part)
        flush = "flush" if run.flush else "no flush"
        return (f"{name + ', ' if name else ''}schedule {run.schedule} ({flush}), "
                f"{counted(len(run.placement), 'stage')} on {counted(len(run.tracks), 'rank')}, "
                + (f"{counted(run.microbatches, 'microbatch')} per update" if run.flush else
                   f"an update every {counted(run.rounds.per_update(0), 'microbatch')}") + ".")

    # -- headline figures

    def _cards(self) -> Iterator[str]:
        yield '<dl class="cards">'
        for name, big, sub in self._headlines():
            yield (f'<div class="card"><dt>{escape(name)}</dt><dd class="big">{big}</dd>'
                   f'<dd class="sub">{escape(sub)}</dd></div>')
        yield "</dl>"

    def _headlines(self) -> Iterator[tuple[str, str, str]]:
        data, figures, expected = self._data, self._data.figures, self._data.expected
        history, unit, totals = data.history, self._unit, data.totals
        yield ("samples per second", f"{totals.samples_per_s:,.1f}",
               "" if totals.tokens_per_s is None else f"{totals.tokens_per_s:,.0f} tokens/s")
        against = ""
        if expected is not None:
            planned_s = expected.figures.step_s if expected.prediction is None else expected.prediction.step_s
            word = "at medians" if expected.prediction is None else "predicted"
            apart = f" ({(totals.step_s / planned_s - 1) * 100:+.1f} %)" if planned_s else ""
            against = f"{word} {milliseconds(planned_s)}{apart}"
        yield f"median {unit}", milliseconds(totals.step_s), against
        planned = ""
        if expected is not None:
            planned = (f"at medians {share_text(expected.figures.bubble)}" if expected.prediction is None else
                       f"planned {share_text(expected.prediction.bubble)}")
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
        peaks = figures.kept_bytes
        if peaks:
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
        if not self._data.history.next_tokens or not all(is_drawable(loss) for _, loss in losses):
            return ""
        found = perplexity(fmean(loss for _, loss in losses))
        return "" if found is None else f", perplexity {compact(found)}"

    @property
    def _limit(self) -> int | None:
        limit = _at(self._data.config, "parallel", "memory")
        return None if limit is None else parse_size(limit, "parallel.memory")

    # -- the timelines

    def _timelines(self) -> Iterator[str]:
        data, expected, window = self._data, self._data.expected, self._run_window
        ran = Lane("As run", self._run, data.producers, window)
        yield "<h2>Timeline</h2>"
        shown = [ran]
        caption = "No whole step was recorded; these are the first actions."
        if window.steps:
            last = window.first + window.steps - 1
            which = f"{self._unit} {window.first}" if window.steps == 1 else f"{self._unit}s {window.first} to {last}"
            caption = (f"{which[0].upper()}{which[1:]} of the run, which took about as long as most, in milliseconds; "
                    "the numbers are microbatches.")
            if window.cut:
                caption += f" Only the beginning of it: a whole {self._unit} has too many actions to draw."
        if expected is not None and self._planned_window is not None:
            word = "As planned" if expected.prediction is not None else "At medians"
            shown.insert(0, Lane(word, expected.recording, expected.producers, self._planned_window))
            caption += f" {expected.basis}"
        yield f'<p class="soft lead">{escape(caption)}</p>'
        yield timeline_figure(shown, self._unit)

    def _idle(self) -> Iterator[str]:
        window = self._data.figures.window
        yield ("<h2>Idle by cause</h2>"
               f'<p class="soft lead">Time per {self._unit} of each rank, mean over '
               f"{counted(max(1, window.steps), self._unit)}. <em>Schedule</em>: the rank's input was not made yet. "
               "<em>Straggler</em>: it would have been, if the action that makes it had taken its usual time. "
               "<em>Waiting for a transfer</em>: it was made and was being sent. <em>Between actions</em>: it was "
               "made, but vpipe did other work, such as reading data.</p>")
        yield idle_bars(self._data, self._unit)

    def _stages_caption(self) -> str:
        expected = self._data.expected
        caption = "Usual times (medians) as run; transfers are handing over and waiting for what is under way. "
        if expected is None:
            return caption
        if expected.prediction is not None:
            return caption + "In small letters: as predicted, and how far the run is from it."
        return caption + "In small letters: at the run's own medians."

    # -- curves

    def _progress(self) -> Iterator[str]:
        history, unit = self._data.history, self._unit
        if not history.losses:
            return
        yield '<h2>Training</h2><div class="charts">'
        few = len(history.losses) <= 100
        lines = [Line("training loss" + " (smoothed)" * (not few),
                      thinned(history.losses) if few else smooth(history.losses), "var(--train)")]
        if not few:
            lines.insert(0, Line(f"each {unit}", thinned(history.losses), "var(--train)", "thin"))
        lines.append(Line("evaluation loss", history.evaluations, "var(--eval)", "dot"))
        yield chart("Loss", lines,
                    f"training loss from {self._loss(history.losses[:1])} to {self._loss(history.losses[-1:])}",
                    unit, compact)
        speeds = history.speeds
        lines = [Line("tokens/s" + " (smoothed)" * (not few), thinned(speeds) if few else smooth(speeds),
                      "var(--speed)")]
        if not few:
            lines.insert(0, Line(f"each {unit}", thinned(speeds), "var(--speed)", "thin"))
        yield chart("Throughput", lines, f"tokens per second over {speeds[-1][0]:.0f} seconds", "seconds",
                    compact, bottom=0.0)
        yield "</div>"

    def _memory(self) -> Iterator[str]:
        curves = self._data.figures.memory
        if not curves:
            return
        window, expected = self._run_window, self._data.expected
        parts = in_window(curves, window)
        planned: dict[int, list[tuple[float, float]]] = {}
        if expected is not None and expected.memory and self._planned_window is not None:
            start_s = self._planned_window.start_s
            planned = {rank: [(second - start_s, held) for second, held in curve] for rank, curve in
                       in_window(dict(enumerate(expected.memory)), self._planned_window).items()}
        peaks = self._data.figures.kept_bytes
        ranks = sorted(sorted(parts, key=lambda rank: -peaks[rank])[:_MOST_CURVES])
        limit = self._limit
        top = max([peaks[rank] for rank in ranks] + [held for rank in ranks for _, held in planned.get(rank, ())])
        close = limit is not None and limit < 2 * top  # a limit far above would flatten the curves
        yield ("<h2>Kept tensors</h2><p class='soft lead'>What each rank kept while the timeline above was recorded: "
               "activations for backwards, weight versions, gradients and optimizer state, counted. Temporary tensors "
               "inside a layer are not included, nor the memory of Python and torch themselves."
               + ("" if limit is None or close else f" The limit of {size_text(limit)} is above the charts.")
               + (f" Of {len(parts)} ranks the {_MOST_CURVES} that hold most." if len(parts) > len(ranks) else "")
               + '</p><div class="charts small">')
        for rank in ranks:
            curve = [(1e3 * (second - window.start_s), held) for second, held in parts[rank]]
            end = 1e3 * window.span_s
            lines = [Line("as run", [*curve, (end, curve[-1][1])] if curve else [], "var(--train)", "area", True)]
            if own := planned.get(rank):
                lines.append(Line("as planned", [(1e3 * second, held) for second, held in own], "var(--plan)", "dash",
                                  True))
            if close and limit is not None:
                lines.append(Line("limit", [(0.0, limit), (end, limit)], "var(--late)", "dash"))
            if curve:
                yield chart(f"rank {rank}: {size_text(peaks[rank])} at most in the run", lines,
                            f"up to {size_text(peaks[rank])}", "ms", size_text, height=110, bottom=0.0, top=top,
                            x_end=end, unit=binary_unit(top))
        yield "</div>"

    def _facts(self) -> Iterator[str]:
        run = self._run
        hosts = sorted({track.host for track in run.tracks if track.host})
        facts = [("partition", str(list(run.partition))),
                 ("ranks of the stages", str([list(own) for own in run.placement])),
                 ("recomputed layers", str([list(own) for own in run.recomputed]) if any(run.recomputed) else "none"),
                 (f"samples per {self._unit}", f"{run.samples_per_step:,}"),
                 ("hosts", ", ".join(hosts) or "–"),
                 ("recorded", f"{sum(len(track.actions) for track in run.tracks):,} actions in {run.end_s:.1f} s"),
                 ("measured over", f"{counted(self._data.figures.window.steps, self._unit)} from "
                  f"{self._unit} {self._data.figures.window.first} on"),
                 ("whole timeline", "trace.json beside this page opens in Perfetto")]
        yield '<h2>The run</h2><dl class="facts">' + "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"


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
