"""Draw line charts whose text stays readable at every width: the lines stretch, the words do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from statistics import fmean

from vpipe.report.figures import Points
from vpipe.visualize.svg import tick_of

_MOST_POINTS = 400
_HUGE = 1e300
_LETTER_PX, _NARROWEST_PX = 6.2, 260


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: for the legend.
        points: in order; the line breaks where a value is no number (:func:`is_drawable`).
        colour: as CSS has it.
        kind: ``line``, ``thin``, ``dash``, ``dot`` (points alone) or ``area``.
        stepped: whether a value holds until the next one.
    """

    name: str
    points: Points
    colour: str
    kind: str = "line"
    stepped: bool = False


def is_drawable(value: float) -> bool:
    """Return whether a chart can show the value: neither NaN nor infinite."""
    return abs(value) < _HUGE


def chart(title: str, lines: Sequence[Line], description: str, x_name: str, value: Callable[[float], str],
          height: int = 200, bottom: float | None = None, top: float | None = None,
          x_value: Callable[[float], str] = lambda x: f"{x:,.6g}", x_end: float | None = None,
          unit: float = 1.0) -> str:
    """Return a chart as HTML; a sentence where there is nothing to draw.

    Args:
        description: the chart in words, for those who cannot see it.
        value: formats an amount for its axis.
        bottom, top: of the vertical axis; the lines' range when left out.
        x_end: of the horizontal one.
        unit: of the vertical axis, which counts in round numbers of it.
    """
    lines = [line for line in lines if any(is_drawable(y) for _, y in line.points)]
    if not lines:
        return f'<figure><h3>{escape(title)}</h3><p class="soft">There is no number to draw.</p></figure>'
    values = [y for line in lines for _, y in line.points if is_drawable(y)]
    x_low = min(x for line in lines for x, _ in line.points)
    x_high = max(max(x for line in lines for x, _ in line.points), x_end or -math.inf)
    if x_high <= x_low:
        x_high = x_low + 1
    low = min(values) if bottom is None else bottom
    high = max(values) if top is None else max(top, *values)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low - pad if bottom is None else low), high + pad
    marks = _multiples(tick_of((high - low) / 4.5 / unit) * unit, low, high)

    def x_of(x: float) -> float:
        return 1000 * (x - x_low) / (x_high - x_low)

    def y_of(y: float) -> float:
        return 100 * (high - y) / (high - low)

    grid = "".join(f'<line class="grid" x1="0" x2="1000" y1="{y_of(y):.2f}" y2="{y_of(y):.2f}"/>' for y in marks)
    paths = "".join(_path(line, x_of, y_of) for line in lines)
    labels = "".join(f'<span style="top:{y_of(y):.2f}%">{escape(value(y))}</span>' for y in marks)
    widest = max((value(y) for y in marks), key=len, default="")
    across = tick_of((x_high - x_low) / 5)
    clear = 1000 * (1 - (_LETTER_PX * len(x_name) + 26) / _NARROWEST_PX)  # of the axis' name, on a phone too
    stops = [stop for stop in _multiples(across, x_low, x_high) if x_of(stop) < clear]
    below = "".join(f'<span style="left:{x_of(x) / 10:.2f}%">{escape(x_value(x))}</span>' for x in stops)
    legend = "".join(f'<li><span class="key {line.kind}" style="{_key(line)}"></span>{escape(line.name)}</li>'
                     for line in lines)
    return (f'<figure><h3>{escape(title)}</h3><ul class="bar soft">{legend}</ul>'
            f'<div class="plot" style="--h:{height}px"><div class="y"><i>{escape(widest)}</i>{labels}</div>'
            f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img"><title>{escape(title)}</title>'
            f"<desc>{escape(description)}</desc>{grid}{paths}</svg>"
            f'<div class="x">{below}<span style="left:100%">{escape(x_name)}</span></div></div></figure>')


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _key(line: Line) -> str:
    return f"background:{line.colour}" if line.kind == "dot" else f"border-color:{line.colour}"


def _path(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    runs = [[(x_of(x), y_of(y)) for x, y in run]
            for drawn, run in groupby(line.points, lambda point: is_drawable(point[1])) if drawn]
    if line.kind == "dot":
        d = "".join(f"M{x:.1f} {y:.2f}h0" for points in runs for x, y in points)
        return f'<path d="{d}" style="stroke:{line.colour};stroke-width:9;stroke-linecap:round"/>'
    return "".join(_run(line, points) for points in runs)


def _run(line: Line, points: Points) -> str:
    if line.stepped:
        d = f"M{points[0][0]:.1f} {points[0][1]:.2f}" + "".join(f"H{x:.1f}V{y:.2f}" for x, y in points[1:])
    else:  # a point alone is seen, too
        d = "M" + "L".join(f"{x:.1f} {y:.2f}" for x, y in points) + "h0" * (len(points) == 1)
    style = {"thin": "stroke-width:1;opacity:.5", "dash": "stroke-width:1.5;stroke-dasharray:5 4"}.get(
        line.kind, "stroke-width:2;stroke-linejoin:round")
    area = f'<path d="{d}V100H{points[0][0]:.1f}Z" style="fill:{line.colour};fill-opacity:.18;stroke:none"/>'
    return f'{area * (line.kind == "area")}<path d="{d}" style="stroke:{line.colour};{style}"/>'


def thinned(points: Points, most: int = _MOST_POINTS) -> Points:
    """Return at most so many points, each the mean of its neighbours that are numbers; NaN where none is."""
    if len(points) <= most:
        return points
    bounds = [len(points) * at // most for at in range(most + 1)]
    return [(fmean(x for x, _ in part), fmean([y for _, y in part if is_drawable(y)] or [math.nan]))
            for part in (points[start:end] for start, end in pairwise(bounds))]


def smooth(points: Points) -> Points:
    """Return the means over a twenty-fifth of the points around each; empty where these are few."""
    reach = len(points) // 50
    if reach < 1:
        return []
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y if is_drawable(y) else 0.0))
        counts.append(counts[-1] + is_drawable(y))
    found = []
    for at, (x, y) in enumerate(points):
        near = min(reach, at, len(points) - 1 - at)
        start, end = at - near, at + near + 1
        found.append((x, (sums[end] - sums[start]) / (counts[end] - counts[start]) if is_drawable(y) else math.nan))
    return thinned(found)
