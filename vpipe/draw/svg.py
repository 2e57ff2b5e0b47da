"""A schedule as an SVG picture: self-contained, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from html import escape

from vpipe.draw.summary import Summary
from vpipe.draw.words import number
from vpipe.schedules.action import Op
from vpipe.schedules.order import stages_of_rank
from vpipe.schedules.simulation.costs import Number
from vpipe.schedules.simulation.timeline import Event

_COLOURS: dict[Op, tuple[str, str]] = {  # on light, on dark
    Op.FORWARD: ("#6ea8fe", "#2563c9"),
    Op.BACKWARD: ("#63c48d", "#1d7a48"),
    Op.INPUT: ("#4fc4c4", "#157a80"),
    Op.WEIGHT: ("#f4b860", "#9a6410"),
    Op.RECOMPUTE: ("#b79cf0", "#6a49b8"),
    Op.STEP: ("#d6336c", "#f06595"),
}
_NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.INPUT: "input half of backward",
          Op.WEIGHT: "weight half", Op.RECOMPUTE: "recompute", Op.STEP: "optimizer step"}
_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328}
.bg{fill:#ffffff}.idle{fill:#eef1f4}.soft{fill:#59636e}.line{stroke:#d1d9e0}
.cell text{fill:#0b1320;text-anchor:middle}.cell .soft{fill:#59636e;font-size:9px}
"""
_DARK = """text{fill:#e6edf3}.bg{fill:#0d1117}.idle{fill:#1b222c}.soft{fill:#9198a1}.line{stroke:#3d444d}
.cell text{fill:#ffffff}.cell .soft{fill:#9198a1}"""

_ROW, _GAP, _LEFT, _TOP = 26, 8, 66, 64
_FONT = 11
_DIGIT = 6.8  # width of a digit at that size
_NARROWEST, _WIDEST, _PICTURE = 5.0, 30.0, 1100.0  # of the shortest action, of the timeline at most


def draw_svg(summary: Summary) -> str:
    """The picture as the text of an SVG file.

    A row per rank, time from left to right; the numbers are microbatches, the shade says which of its rank's stages
    computes. Without a flush the small numbers are the weight versions in use. Hovering an action says all of it.
    """
    return "\n".join(_Drawing(summary).lines()) + "\n"


class _Drawing:
    """Where everything goes."""

    def __init__(self, summary: Summary) -> None:
        self._summary, self._timeline = summary, summary.timeline
        self._versions = summary.versions_used
        durations = [float(event.end_s - event.start_s) for events in self._timeline.events for event in events
                     if event.end_s > event.start_s]
        end = float(self._timeline.makespan_s)
        shortest = min(durations)
        # As wide as labels want, narrower to fit the page, but never so narrow that actions cannot be told apart.
        wanted = min(_WIDEST / shortest, _PICTURE / end)
        self._scale = max(wanted, _NARROWEST / shortest)
        self._row = _ROW + (12 if self._versions else 0)
        self._columns = self._holdings()
        self._right = _LEFT + end * self._scale + 14
        legend = sum(self._legend_width(op) for op in self._used()) + _LEFT
        self._width = max(self._right + sum(width for _, width, _ in self._columns) + 10, legend, 600.0)
        self._bottom = _TOP + len(self._timeline.events) * (self._row + _GAP)

    def lines(self) -> Iterator[str]:
        """The file, line by line."""
        summary, width, height = self._summary, math.ceil(self._width), self._bottom + 80
        yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
               f'viewBox="0 0 {width} {height}" role="img" font-size="{_FONT}">')
        yield f"<title>{escape(summary.schedule.name)}: {escape(summary.title())}; {escape(summary.times())}</title>"
        yield f"<style>{_STYLE}{self._colours()}</style>"
        yield f'<rect class="bg" width="{width}" height="{height}"/>'
        yield (f'<text x="14" y="24" font-size="16" font-weight="600">{escape(summary.schedule.name)}'
               f'<tspan class="soft" dx="10" font-size="12" font-weight="400">{escape(summary.title())}</tspan></text>')
        yield (f'<text class="soft" x="14" y="42" font-size="12">{escape(summary.times())} '
               f"({escape(str(summary.costs))})</text>")
        yield from self._heads()
        for rank, events in enumerate(self._timeline.events):
            yield from self._rank(rank, events)
        yield from self._axis()
        yield from self._legend()
        yield "</svg>"

    def _colours(self) -> str:
        """One class per operation and stage of a rank; later stages are paler."""
        chunks = 1 + max(self._summary.chunk_of)
        light, dark = [], []
        for op in self._used():
            bright, deep = _COLOURS[op]
            for chunk in range(1 if op is Op.STEP else chunks):
                share = chunk / max(1, chunks - 1)
                light.append(f".{op.value}{chunk}{{fill:{_mixed(bright, '#ffffff', 0.6 * share)}}}")
                dark.append(f".{op.value}{chunk}{{fill:{_mixed(deep, '#0d1117', 0.45 * share)}}}")
        return f"{''.join(light)}\n@media(prefers-color-scheme:dark){{{_DARK}\n{''.join(dark)}}}\n"

    def _used(self) -> list[Op]:
        there = {event.action.op for events in self._timeline.events for event in events}
        return [op for op in _COLOURS if op in there]

    def _x(self, seconds: Number) -> float:
        return _LEFT + float(seconds) * self._scale

    def _rank(self, rank: int, events: Sequence[Event]) -> Iterator[str]:
        y = _TOP + rank * (self._row + _GAP)
        middle = y + _ROW / 2 + 4
        yield f'<text x="14" y="{_n(middle)}" font-size="12">rank {rank}</text>'
        yield (f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_n(self._x(self._timeline.makespan_s) - _LEFT)}" '
               f'height="{_ROW}" rx="3"/>')
        yield '<g class="cell">'
        steps = []
        for event in events:
            if event.action.op is Op.STEP:
                steps.append(event)
            else:
                yield from self._action(event, y)
        for event in steps:
            x, width = self._x(event.start_s), max(3.0, float(event.end_s - event.start_s) * self._scale)
            yield (f'<rect class="STEP0" x="{_n(x - 1.5)}" y="{y - 2}" width="{_n(width)}" height="{_ROW + 4}" '
                   f'rx="1.5"><title>{event.action} at {number(event.start_s)}</title></rect>')
        yield "</g>"
        x = self._right
        for _, width, cells in self._columns:
            yield (f'<text class="soft" x="{_n(x + width / 2)}" y="{_n(middle)}" text-anchor="middle">'
                   f"{cells[rank]}</text>")
            x += width

    def _action(self, event: Event, y: int) -> Iterator[str]:
        action = event.action
        x, width = self._x(event.start_s), float(event.end_s - event.start_s) * self._scale
        version = self._versions.get((action.stage, action.microbatch))
        says = f"{action}, {number(event.start_s)} to {number(event.end_s)}"
        says += "" if version is None else f", weight version {version}"
        gap = 1.0 if width > 6 else 0.4
        yield (f'<rect class="{action.op.value}{self._summary.chunk_of[action.stage]}" x="{_n(x + gap / 2)}" y="{y}" '
               f'width="{_n(max(0.2, width - gap))}" height="{_ROW}" rx="{3 if width > 12 else 1}">'
               f"<title>{says}</title></rect>")
        if len(str(action.microbatch)) * _DIGIT + 2 <= width:
            yield f'<text x="{_n(x + width / 2)}" y="{_n(y + _ROW / 2 + 4)}">{action.microbatch}</text>'
        if version is not None and len(f"v{version}") * 5.6 <= width:
            yield f'<text class="soft" x="{_n(x + width / 2)}" y="{y + _ROW + 10}">v{version}</text>'

    def _holdings(self) -> list[tuple[str, float, list[str]]]:
        """The columns behind the timeline: head, width, a cell per rank."""
        summary = self._summary
        columns = [("peak act.", [str(rank.peak_activations) for rank in summary.ranks])]
        if any(rank.peak_weight_halves for rank in summary.ranks):
            columns.append(("W halves", [str(rank.peak_weight_halves) for rank in summary.ranks]))
        if not summary.schedule.flush:
            for head, values in (("versions", [stage.versions for stage in summary.stages]),
                                 ("staleness", [stage.staleness for stage in summary.stages])):
                columns.append((head, [" ".join(str(values[stage]) for stage in
                                                stages_of_rank(summary.schedule.placement, rank))
                                       for rank in range(summary.schedule.ranks)]))
        return [(head, max(60.0, _DIGIT * max(map(len, cells)) + 12), cells) for head, cells in columns]

    def _heads(self) -> Iterator[str]:
        x = self._right
        for head, width, _ in self._columns:
            yield f'<text class="soft" x="{_n(x + width / 2)}" y="{_TOP - 9}" text-anchor="middle">{head}</text>'
            x += width

    def _axis(self) -> Iterator[str]:
        end = float(self._timeline.makespan_s)
        tick = _tick(60 / self._scale)
        y = self._bottom - _GAP + 5
        yield f'<line class="line" x1="{_LEFT}" x2="{_n(self._x(end))}" y1="{y}" y2="{y}"/>'
        count = math.floor(end / tick + 1e-9)
        for time in [Fraction(tick) * index for index in range(count + 1)]:
            x = self._x(time)
            yield (f'<line class="line" x1="{_n(x)}" x2="{_n(x)}" y1="{y}" y2="{y + 4}"/>'
                   f'<text class="soft" font-size="10" text-anchor="middle" x="{_n(x)}" y="{y + 15}">'
                   f"{number(time)}</text>")

    def _legend_width(self, op: Op) -> float:
        return 34 + 5.9 * len(_NAMES[op])

    def _legend(self) -> Iterator[str]:
        x, y = float(_LEFT), self._bottom + 34
        for op in self._used():
            width = 4 if op is Op.STEP else 14
            yield (f'<rect class="{op.value}0" x="{_n(x)}" y="{y}" width="{width}" height="14" rx="2"/>'
                   f'<text x="{_n(x + width + 5)}" y="{y + 11}">{_NAMES[op]}</text>')
            x += self._legend_width(op)
        yield f'<text class="soft" x="{_LEFT}" y="{y + 32}">{"; ".join(self._notes())}</text>'

    def _notes(self) -> list[str]:
        return ["numbers: microbatches",
                *(["paler: not the first of the rank's stages"] if self._summary.chunks != "1" else []),
                *(["v: the weight version in use"] if self._versions else [])]


def _mixed(colour: str, other: str, share: float) -> str:
    """``colour`` with a share of ``other``."""
    parts = [(int(colour[at:at + 2], 16), int(other[at:at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(one * (1 - share) + two * share):02x}" for one, two in parts)


def _tick(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))


def _n(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
