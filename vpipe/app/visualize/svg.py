"""Draw a schedule as an SVG picture: self-contained, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from html import escape

from vpipe.app.visualize.summary import Summary
from vpipe.app.visualize.table import Number, number, row_name, sizes
from vpipe.schedules import Action, kinds

Event = tuple[Action, Number, Number]
"""An action with its start and its end in seconds."""

_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328}
.bg{fill:#ffffff}.idle{fill:#eef1f4}.soft{fill:#59636e}.line{stroke:#d1d9e0}
.cell text{fill:#0b1320;text-anchor:middle}.cell .small{font-size:8px}.cell .soft{fill:#59636e}
"""
_DARK = """text{fill:#e6edf3}.bg{fill:#0d1117}.idle{fill:#262e38}.soft,.cell .soft{fill:#9198a1}.line{stroke:#3d444d}"""

_ROW, _GAP, _LEFT, _TOP = 26, 8, 66, 64
_FONT = 11
_NAME = 6.2  # width of a character of a row's name
_DIGIT, _SMALL_DIGIT = 6.8, 5.0  # width of a digit at that size and at the small one
_NARROWEST, _WIDEST = 5.0, 30.0  # of the shortest action
_PICTURE, _LARGEST = 900.0, 16000.0  # of the timeline, where actions are not too narrow, and ever
_MIDDLE = 24  # width of the gap where the middle of a schedule that is too long to list is left out
_SMALL = ' class="small"'
_UNSEEN = 20  # an action that is so many times shorter than the longest may be too narrow to see


def draw_svg(summary: Summary) -> str:
    """Return the picture as the text of an SVG file: a row per rank, time from left to right.

    The numbers are microbatches (where there is no room, every second, fifth or so). The shade tells which of its
    rank's stages computes. Without a flush the numbers below are the weight versions in use.
    """
    return "\n".join(_Drawing(summary).lines()) + "\n"


class _Drawing:
    """The layout and the elements of one picture."""

    def __init__(self, summary: Summary) -> None:
        self._summary, self._timeline = summary, summary.timeline
        self._versions = summary.versions_used
        placement = summary.schedule.placement
        self._names = [row_name(placement, rank) for rank in range(summary.schedule.ranks)]
        self._left = max(_LEFT, math.ceil(14 + _NAME * max(map(len, self._names))))
        durations = [float(event.end_s - event.start_s) for events in self._timeline.events for event in events
                     if event.end_s > event.start_s]
        end = self._shown(self._timeline.makespan_s)
        shortest = max(min(durations), max(durations) / _UNSEEN)
        # As wide as labels want, narrower to fit the page, but never so narrow that actions cannot be told apart.
        wanted = min(_WIDEST / shortest, _PICTURE / end)
        self._scale = min(max(wanted, _NARROWEST / shortest), _LARGEST / end)
        self._row = _ROW + (14 if self._versions else 0)
        self._columns = self._holdings()
        self._right = self._left + end * self._scale + 14
        used = {event.action.op for events in self._timeline.events for event in events}
        chunks = 1 + max(summary.chunk_of)
        self._shades = {op: chunks if op.per_microbatch else 1 for op in kinds.known() if op in used}
        legend = sum(width for _, _, width in self._entries()) + self._left
        self._width = max(self._right + sum(width for _, width, _ in self._columns) + 10, legend, 600.0)
        self._bottom = _TOP + len(self._timeline.events) * (self._row + _GAP)

    def _shown(self, seconds: Number) -> float:
        """Return a time without what is left out of the picture before it."""
        begin, end = self._summary.left_out or (0, 0)
        return float(seconds - max(0, min(seconds, end) - begin)) if end else float(seconds)

    def lines(self) -> Iterator[str]:
        """Yield the file, line by line."""
        summary, width = self._summary, math.ceil(self._width)
        height = self._bottom + (96 if summary.left_out is None else 112)
        yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
               f'viewBox="0 0 {width} {height}" role="img" font-size="{_FONT}">')
        name, title, times = escape(summary.schedule.name), sizes(summary.schedule), escape(summary.times())
        yield f"<title>{name}: {title}; {times}</title>"
        # One class per operation and stage of a rank; later stages are paler.
        fills = "".join(f".{op}{chunk}{{fill:{mixed(op.colour, 0.65 * chunk / max(1, shades - 1))}}}"
                        for op, shades in self._shades.items() for chunk in range(shades))
        yield f"<style>{_STYLE}{fills}\n@media(prefers-color-scheme:dark){{{_DARK}}}\n</style>"
        yield f'<rect class="bg" width="{width}" height="{height}"/>'
        yield (f'<text x="14" y="24" font-size="16" font-weight="600">{name}'
               f'<tspan class="soft" dx="10" font-size="12" font-weight="400">{title}</tspan></text>')
        yield f'<text class="soft" x="14" y="42" font-size="12">{times} ({escape(str(summary.costs))})</text>'
        x = self._right
        for head, column_width, _ in self._columns:
            yield f'<text class="soft" x="{_n(x + column_width / 2)}" y="{_TOP - 9}" text-anchor="middle">{head}</text>'
            x += column_width
        begin, end = summary.left_out or (0, 0)
        for rank, events in enumerate(self._timeline.events):
            yield from self._rank(rank, [event for event in events if not begin <= event.start_s < end])
        if summary.left_out is not None:
            x = self._x(summary.left_out[0])
            yield (f'<rect class="bg" x="{_n(x - _MIDDLE / 2)}" y="{_TOP - 4}" width="{_MIDDLE}" '
                   f'height="{self._bottom - _TOP + 8}"/><text class="soft" x="{_n(x)}" y="{_TOP - 9}" '
                   'text-anchor="middle">...</text>')
        yield from self._axis()
        yield from self._legend()
        yield "</svg>"

    def _x(self, seconds: Number) -> float:
        return self._left + self._shown(seconds) * self._scale

    def _rank(self, rank: int, events: Sequence[Event]) -> Iterator[str]:
        y = _TOP + rank * (self._row + _GAP)
        middle = y + _ROW / 2 + 4
        yield f'<text x="14" y="{_n(middle)}" font-size="12">{self._names[rank]}</text>'
        width = self._x(self._timeline.makespan_s) - self._left
        yield f'<rect class="idle" x="{self._left}" y="{y}" width="{_n(width)}" height="{_ROW}" rx="3"/>'
        yield '<g class="cell">'
        for action, start_s, end_s in events:
            if action.op.per_microbatch:
                yield self._action(action, start_s, end_s, y)
        for action, start_s, end_s in events:
            if not action.op.per_microbatch:
                x, width = self._x(start_s), max(3.0, float(end_s - start_s) * self._scale)
                yield (f'<rect class="{action.op}0" x="{_n(x - 1.5)}" y="{y - 2}" width="{_n(width)}" '
                       f'height="{_ROW + 4}" rx="1.5"><title>{action} at {number(start_s)}</title></rect>')
        yield from self._labels(events, y)
        yield "</g>"
        x = self._right
        for _, width, cells in self._columns:
            yield (f'<text class="soft" x="{_n(x + width / 2)}" y="{_n(middle)}" text-anchor="middle">'
                   f"{cells[rank]}</text>")
            x += width

    def _action(self, action: Action, start_s: Number, end_s: Number, y: int) -> str:
        x, width = self._x(start_s), float(end_s - start_s) * self._scale
        version = self._versions.get((action.stage, action.index))
        title = f"{action}, {number(start_s)} to {number(end_s)}"
        title += "" if version is None else f", weight version {version}"
        gap = 1.0 if width > 6 else 0.4
        return (f'<rect class="{action.op}{self._summary.chunk_of[action.stage]}" x="{_n(x + gap / 2)}" y="{y}" '
                f'width="{_n(max(0.2, width - gap))}" height="{_ROW}" rx="{3 if width > 12 else 1}">'
                f"<title>{title}</title></rect>")

    def _labels(self, events: Sequence[Event], y: int) -> Iterator[str]:
        """Yield microbatches and, below, the versions in use, as far as there is room."""
        free = float(self._left)  # from where on a number that is wider than its action meets no other
        for action, start_s, end_s in events:
            start, width = self._x(start_s), float(end_s - start_s) * self._scale
            if not action.op.per_microbatch or width < 1:
                continue
            x = start + width / 2
            version = self._versions.get((action.stage, action.index))
            digits = len(str(action.index))
            small = digits * _DIGIT + 2 > width
            taken = digits * (_SMALL_DIGIT if small else _DIGIT)
            if taken <= width or (action.index % _every(taken / width) == 0 and x - taken / 2 >= free):
                yield (f'<text{_SMALL * small} x="{_n(x)}" '
                       f'y="{_n(y + _ROW / 2 + (3 if small else 4))}">{action.index}</text>')
                free = x + taken / 2 + 2
            if version is not None and len(f"v{version}") * _DIGIT <= width:
                yield f'<text class="soft" x="{_n(x)}" y="{y + _ROW + 11}">v{version}</text>'

    def _holdings(self) -> list[tuple[str, float, list[str]]]:
        """Return the columns to the right of the timeline: head, width, a cell per rank."""
        summary = self._summary
        columns = [("activations", [str(rank.peak_activations) for rank in summary.proved.rank_peaks])]
        if any(rank.peak_weight_halves for rank in summary.proved.rank_peaks):
            columns.append(("W halves", [str(rank.peak_weight_halves) for rank in summary.proved.rank_peaks]))
        if not summary.schedule.flush:
            columns += [("versions", summary.per_rank("versions")), ("staleness", summary.per_rank("staleness"))]
        return [(head, max(66.0, _DIGIT * max(map(len, cells)) + 12), cells) for head, cells in columns]

    def _axis(self) -> Iterator[str]:
        end = self._timeline.makespan_s
        tick = tick_of(60 / self._scale)
        y = self._bottom - _GAP + 5
        yield f'<line class="line" x1="{self._left}" x2="{_n(self._x(end))}" y1="{y}" y2="{y}"/>'
        begin, beyond = self._summary.left_out or (end, end)
        for index in range(math.floor(float(end) / tick + 1e-9) + 1):
            time = Fraction(tick) * index
            if begin < time < beyond:
                continue
            x = self._x(time)
            yield (f'<line class="line" x1="{_n(x)}" x2="{_n(x)}" y1="{y}" y2="{y + 4}"/>'
                   f'<text class="soft" font-size="10" text-anchor="middle" x="{_n(x)}" y="{y + 15}">'
                   f"{number(time)}</text>")

    def _entries(self) -> list[tuple[list[tuple[str, int]], str, float]]:
        """Return the legend: swatches (class and width), their text, the width of it all."""
        entries = [([(f"{op}{chunk}", 14 if op.per_microbatch else 4) for chunk in range(shades)], op.name)
                   for op, shades in self._shades.items()]
        return [(swatches, name, sum(width for _, width in swatches) + 20 + 5.9 * len(name))
                for swatches, name in (*entries, ([("idle", 14)], "idle"))]

    def _legend(self) -> Iterator[str]:
        x, y = float(self._left), self._bottom + 34
        for swatches, name, width in self._entries():
            at = x
            for fill, wide in swatches:
                yield f'<rect class="{fill}" x="{_n(at)}" y="{y}" width="{wide}" height="14"/>'
                at += wide
            yield f'<text x="{_n(at + 5)}" y="{y + 11}">{name}</text>'
            x += width
        several, halves = self._summary.stages_per_rank != "1", any(head == "W halves" for head, _, _ in self._columns)
        unit = "microbatches" if self._summary.schedule.slices == 1 else "slices of microbatches"
        notes = [f"numbers: {unit}"
                 + "; shades: the rank's stages, from its first to its last, the palest" * any(self._summary.chunk_of)
                 + "; v: the weight version in use" * bool(self._versions),
                 f"activations{', W halves' * halves}: the most that the rank holds at once, in {unit}"
                 + " of one stage" * several]
        if self._summary.left_out is not None:
            notes.append(f"...: {self._summary.said_left_out(*self._summary.left_out)}")
        for line, note in enumerate(notes):
            yield f'<text class="soft" x="{self._left}" y="{y + 32 + 16 * line}">{note}</text>'


def _every(ratio: float) -> int:
    """Return the distance of microbatches whose number has room, for actions narrower than their number: 2, 5, ..."""
    return next((step for step in (2, 5, 10, 20, 50, 100) if step >= ratio), 1000)


def mixed(colour: str, share: float) -> str:
    """Return ``colour`` mixed with a share of white."""
    parts = [int(colour[at:at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part * (1 - share) + 255 * share):02x}" for part in parts)


def tick_of(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))


def _n(value: float) -> str:
    """Return a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
