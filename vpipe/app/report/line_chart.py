"""Fill in the templates of a report, and draw line charts whose text stays readable at every width: the lines stretch,
the words do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vpipe.app.report.figures import Points
from vpipe.app.visualize.svg import tick_of

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_POINTS = 400
_HUGE = 1e300
_LETTER_PX, _NARROWEST_PX = 6.2, 260


def render(template: str, **values: Any) -> str:
    """Return a template of this folder with its values, which it escapes unless it says that they are safe."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, for most commands write no page

    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


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
          height: int = 200, bottom: float | None = None, top: float | None = None, x_end: float | None = None,
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
        return render("chart.html", title=title, lines=lines)
    values = [y for line in lines for _, y in line.points if is_drawable(y)]
    x_low = min(x for line in lines for x, _ in line.points)
    x_high = max(max(x for line in lines for x, _ in line.points), x_end or -math.inf)
    if x_high <= x_low:
        x_high = x_low + 1
    low = min(values) if bottom is None else bottom
    high = max(values) if top is None else max(top, *values)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low - pad if bottom is None else low), high + pad

    def x_of(x: float) -> float:
        return 1000 * (x - x_low) / (x_high - x_low)

    def y_of(y: float) -> float:
        return 100 * (high - y) / (high - low)

    rows = [(y_of(y), value(y)) for y in _multiples(tick_of((high - low) / 4.5 / unit) * unit, low, high)]
    clear = 1000 * (1 - (_LETTER_PX * len(x_name) + 26) / _NARROWEST_PX)  # of the axis' name, on a phone too
    stops = [stop for stop in _multiples(tick_of((x_high - x_low) / 5), x_low, x_high) if x_of(stop) < clear]
    return render("chart.html", title=title, lines=lines, description=description, x_name=x_name, height=height,
                  rows=rows, widest=max((label for _, label in rows), key=len, default=""),
                  columns=[(x_of(x) / 10, f"{x:,.6g}") for x in stops],
                  paths=[path for line in lines for path in _paths(line, x_of, y_of)])


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


_STYLES = {"thin": "stroke-width:1;opacity:.5", "dash": "stroke-width:1.5;stroke-dasharray:5 4"}


def _paths(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Iterator[tuple[str, str]]:
    """Yield the paths of a line, one per run of drawable points, each with its style."""
    runs = [[(x_of(x), y_of(y)) for x, y in run]
            for drawn, run in groupby(line.points, lambda point: is_drawable(point[1])) if drawn]
    if line.kind == "dot":
        yield ("".join(f"M{x:.1f} {y:.2f}h0" for points in runs for x, y in points),
               f"stroke:{line.colour};stroke-width:9;stroke-linecap:round")
        return
    for points in runs:
        if line.stepped:
            d = f"M{points[0][0]:.1f} {points[0][1]:.2f}" + "".join(f"H{x:.1f}V{y:.2f}" for x, y in points[1:])
        else:  # a point alone is seen, too
            d = "M" + "L".join(f"{x:.1f} {y:.2f}" for x, y in points) + "h0" * (len(points) == 1)
        if line.kind == "area":
            yield f"{d}V100H{points[0][0]:.1f}Z", f"fill:{line.colour};fill-opacity:.18;stroke:none"
        yield d, f"stroke:{line.colour};{_STYLES.get(line.kind, 'stroke-width:2;stroke-linejoin:round')}"


def thinned(points: Points, most: int = _MOST_POINTS) -> Points:
    """Return at most so many points, each the mean of its neighbours that are numbers; NaN where none is."""
    if len(points) <= most:
        return points
    bounds = [len(points) * at // most for at in range(most + 1)]
    return [(fmean(x for x, _ in part), fmean([y for _, y in part if is_drawable(y)] or [math.nan]))
            for part in (points[start:end] for start, end in pairwise(bounds))]
