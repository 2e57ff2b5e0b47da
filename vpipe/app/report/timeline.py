"""Draw the timeline as planned above the timeline as run, on one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from vpipe.app.report.figures import Window, step_ends
from vpipe.app.report.idle_causes import Cause, Producers, TimeSlice, time_slices
from vpipe.app.report.line_chart import render
from vpipe.app.report.recording import Recording, describe
from vpipe.app.visualize.svg import mixed, tick_of
from vpipe.app.visualize.table import milliseconds, number, row_name
from vpipe.schedules import kinds

FILLS = {Cause.SCHEDULE: "var(--idle)", Cause.TRANSFER: "url(#transfer)", Cause.STRAGGLER: "url(#straggler)",
         Cause.DISPATCH: "url(#dispatch)", Cause.UNKNOWN: "url(#unknown)"}
"""Colours and patterns, which colour-blind eyes can tell apart on a light and on a dark page."""

_ROW, _GAP, _HEAD, _AXIS = 26, 6, 34, 28
_NARROWEST_PX = 680  # of the picture on a phone
_DIGIT = 6.8
_FITS = {1.0: "", 1.55: "lw", 2.0: "l2", 4.0: "l4", 8.0: "l8"}
"""Classes of labels by the width that they need, as a multiple of the narrowest; lw is that of a wide window."""
_UNSEEN = 0.0002  # of the width: what is narrower is left out
_AGAIN_INSET, _HANDED_INSET = 4, 8  # lower than other actions, for colour-blind eyes


@dataclass(frozen=True)
class Lane:
    """One of the timelines: a window of a recording."""

    title: str
    recording: Recording
    producers: Producers
    window: Window


class TimelineFigure:
    """The figure of all timelines; ``unit`` is the name of a step."""

    def __init__(self, lanes: Sequence[Lane], unit: str) -> None:
        self._lanes, self._unit = lanes, unit
        self._end_s = max(lane.window.span_s for lane in lanes) * 1.002
        self._stages = stages_per_rank(lanes[0].recording)
        self._parts = [[[piece for piece in time_slices(lane.recording, track, lane.producers)
                         if piece.end_s > lane.window.start_s and piece.start_s < lane.window.end_s]
                        for track in lane.recording.tracks] for lane in lanes]

    def html(self) -> str:
        y, elements = 0, list[str]()
        for lane, ranks in zip(self._lanes, self._parts, strict=True):
            elements += self._lane(lane, ranks, y)
            y += _HEAD + len(ranks) * (_ROW + _GAP)
        return render("timeline.html", lanes=self._lanes, unit=self._unit, legend=self._legend(), height=y + _AXIS,
                      elements="\n".join([*elements, *self._axis(y)]), head=_HEAD, row=_ROW, gap=_GAP,
                      zooms=(1, 2, 4, 8), row_name=row_name, milliseconds=milliseconds)

    def _legend(self) -> Iterator[tuple[Sequence[str], str, int]]:
        """Yield fills, the name, and what is taken off the top and bottom, of all that is drawn."""
        pieces = [piece for ranks in self._parts for own in ranks for piece in own]
        causes = {piece.cause for piece in pieces}
        ops = {piece.done.op for piece in pieces if piece.cause is None and piece.done is not None}
        for op, shades in shades_of(ops, self._stages).items():
            yield shades, op.name, 2 * op.recomputation
        if not all(op.works for op in ops):
            yield ["var(--comm)"], "handing over", 4
        yield from (([FILLS[cause]], f"idle: {cause.value}", 0) for cause in Cause if cause in causes)

    def _x(self, seconds: float) -> float:
        """Return the position in percent of the width."""
        return 100 * seconds / self._end_s

    def _lane(self, lane: Lane, ranks: Sequence[Sequence[TimeSlice]], y: int) -> Iterator[str]:
        window, recording = lane.window, lane.recording
        bottom = y + _HEAD + len(ranks) * (_ROW + _GAP) - _GAP
        width = self._x(window.span_s)
        for rank, own in enumerate(ranks):
            row = y + _HEAD + rank * (_ROW + _GAP)
            yield f'<rect x="0" y="{row}" width="{_n(width)}%" height="{_ROW}" fill="var(--idle)"/>'
            stages = recording.stages_of(rank)
            for piece in sorted(own, key=_is_step):  # steps on top: they are narrow
                yield from self._piece(lane, piece, stages, row)
        # Where its steps begin and end, with their numbers.
        bounds = [(step, end) for step, end in step_ends(recording).items()
                  if window.start_s - 1e-9 <= end <= window.end_s + 1e-9]
        for _, end in bounds:
            x = self._x(end - window.start_s)
            if x > 0:
                yield f'<line class="mark" x1="{_n(x)}%" x2="{_n(x)}%" y1="{y + _HEAD - 6}" y2="{bottom}"/>'
        starts = [(window.first, window.start_s), *((step + 1, end) for step, end in bounds if end > window.start_s)]
        free = 0.0  # from where on a label meets no other
        for step, start in starts:  # both timelines count alike
            number = step + self._lanes[-1].window.first - window.first
            x, label = self._x(start - window.start_s), f"{self._unit} {number}"
            wide = 100 * (len(label) * 6.4 + 12) / _NARROWEST_PX
            if free <= x <= min(100, width) - wide:
                yield f'<text class="ax" x="{_n(x)}%" dx="4" y="{y + _HEAD - 8}">{label}</text>'
                free = x + wide

    def _piece(self, lane: Lane, piece: TimeSlice, stages: Sequence[int], row: int) -> Iterator[str]:
        window = lane.window
        start, end = (min(max(second, window.start_s), window.end_s) - window.start_s
                      for second in (piece.start_s, piece.end_s))
        share = (end - start) / self._end_s
        done, step = piece.done, _is_step(piece)
        if share < _UNSEEN and not step:
            return
        inset = 0
        if piece.cause is None and done is not None:
            inset = _HANDED_INSET if not done.op.works else _AGAIN_INSET if done.op.recomputation else 0
        place = (f'x="{_n(self._x(start))}%" y="{row + inset}" width="{_n(100 * share)}%" '
                 f'height="{_ROW - 2 * inset}"')
        took = milliseconds(piece.end_s - piece.start_s)
        what = "" if done is None else describe(done, lane.recording.slices)
        if piece.cause is not None:
            before = "" if done is None else f" before {done.action}"
            yield (f'<rect {place} fill="{FILLS[piece.cause]}"><title>idle, {took}{before}: {piece.cause.value}</title>'
                   "</rect>")
        elif done is None:
            yield f'<rect {place} fill="var(--panel)"><title>evaluation, {took}</title></rect>'
        elif not done.op.works:
            yield f'<rect {place} class="comm"><title>{done.action}: {what}; {took}</title></rect>'
        else:
            nth = stages.index(done.stage) if done.op.per_microbatch and done.stage in stages else 0
            waited = f", waited {milliseconds(done.waited_s)}" if done.waited_s > 0 else ""
            yield (f'<rect {place} class="{"cell " * (not step)}{done.op}{nth}">'
                   f"<title>{done.action}: {what}; {took}{waited}</title></rect>")
            if not step:
                yield self._label(lane, done.number, start + (end - start) / 2, share, row)

    def _label(self, lane: Lane, index: int, middle: float, share: float, row: int) -> str:
        """Return the number of a microbatch, in its batch or else in the window, shown from the zoom that has room."""
        recording = lane.recording
        shown = index % (recording.microbatches * recording.slices) if recording.flush else index
        if not recording.flush:  # so that both timelines count alike
            shown += (self._lanes[-1].window.first - lane.window.first) * recording.dependencies.assignment.per_step
        if shown < 0:
            return ""
        needs = (len(str(shown)) * _DIGIT + 3) / (share * _NARROWEST_PX)
        fits = next((name for width, name in _FITS.items() if needs <= width), None)
        if fits is None:
            return ""
        style = f' class="{fits}"' if fits else ""
        return f'<text{style} x="{_n(self._x(middle))}%" y="{row + _ROW // 2 + 4}" pointer-events="none">{shown}</text>'

    def _axis(self, y: int) -> Iterator[str]:
        tick = tick_of(self._end_s * 1e3 / 9)
        yield f'<line class="grid" x1="0" x2="100%" y1="{y + 2}" y2="{y + 2}"/>'
        for index in range(math.floor(self._end_s * 1e3 / tick + 1e-9) + 1):
            x = self._x(index * tick / 1e3)
            yield f'<line class="grid" x1="{_n(x)}%" x2="{_n(x)}%" y1="{y + 2}" y2="{y + 7}"/>'
            if x < 95:
                yield (f'<text class="ax" x="{_n(x)}%" dx="3" y="{y + 19}">'
                       f'{number(Fraction(tick).limit_denominator(10**6) * index)}{" ms" * (index == 0)}</text>')


def _is_step(piece: TimeSlice) -> bool:
    return piece.cause is None and piece.done is not None and not piece.done.op.per_microbatch and piece.done.op.works


def shades_of(used: set[kinds.Kind], stages: int) -> dict[kinds.Kind, list[str]]:
    """Return the colours of each operation by the number of the stage on its rank; of ``stages`` later ones are paler.
    """
    return {op: [mixed(op.colour, 0.6 * number / max(1, stages - 1))
                 for number in range(stages if op.per_microbatch else 1)]
            for op in kinds.known() if op.works and op in used}


def stages_per_rank(recording: Recording) -> int:
    """Return the most stages that a rank has."""
    return max(len(recording.stages_of(track.rank)) for track in recording.tracks)


def _n(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
