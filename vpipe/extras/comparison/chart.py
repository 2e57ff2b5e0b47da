"""Draw the comparison as one self-contained SVG, for light and dark backgrounds: throughput, memory, loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from vpipe.app.report.line_chart import thinned
from vpipe.app.visualize.svg import tick_of
from vpipe.extras.comparison.results import Comparison, Outcome
from vpipe.units import size_text

_COLOURS = ("#3b7dd8", "#d9822b", "#2a9d6f", "#a45cc9", "#c94f5c", "#2aa3b0", "#8a7a2e", "#7a7f87")
_DARK_COLOURS = ("#6ea8fe", "#f0a860", "#63c48d", "#c79be8", "#ef8a94", "#6fd0da", "#cbb95e", "#a9b1ba")
_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328;font-size:12px}
.bg{fill:#ffffff}.soft{fill:#59636e}.line{stroke:#d1d9e0}.limit{stroke:#c93c37;stroke-dasharray:5 3}
.warn{fill:#c93c37}
.head{font-size:13px;font-weight:600}.small{font-size:10px}.whisker{stroke:#1f2328;stroke-width:1.5}
"""
_DARK = """text{fill:#e6edf3}.bg{fill:#0d1117}.soft{fill:#9198a1}.line{stroke:#3d444d}.limit{stroke:#ff7b72}
.warn{fill:#ff7b72}.whisker{stroke:#e6edf3}"""

_WIDTH, _MARGIN, _PLOT, _BAR, _LETTER = 960, 20, 200, 20, 6.5
_ROW = 2 * _BAR + 14


class _Box(NamedTuple):
    """The place of a panel."""

    x: float
    y: float
    width: float
    height: float


def draw(comparison: Comparison) -> str:
    """Return the picture as the text of an SVG file."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    outcomes, limit = comparison.outcomes, comparison.memory_bytes
    bars, half = len(outcomes) * _ROW + 10, (_WIDTH - 3 * _MARGIN) / 2
    top, right = 84, 2 * _MARGIN + half
    curves = top + bars + 50
    height = curves + _PLOT + 56 + 18 * len(comparison.refused)
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
           f'viewBox="0 0 {_WIDTH} {height}" role="img" style="max-width:100%;height:auto">')
    yield f"<title>{escape(comparison.title)}</title>"
    yield f"<style>{_STYLE}{_colours(_COLOURS)}\n@media(prefers-color-scheme:dark){{{_DARK}{_colours(_DARK_COLOURS)}}}"
    yield "</style>"
    yield f'<rect class="bg" width="{_WIDTH}" height="{height}"/>'
    yield _text(_MARGIN, 26, comparison.title, style="font-size:16px;font-weight:600")
    yield _text(_MARGIN, 44, ("no limit on memory" if limit is None else f"each rank may use {size_text(limit)}")
                + f"; {comparison.equal_updates} updates each", "soft")
    if comparison.too_short:
        yield _text(_MARGIN, 60, comparison.too_short, "warn")
    yield from _throughput(outcomes, _Box(_MARGIN, top, half, bars))
    yield from _memory(comparison, _Box(right, top, half, bars))
    losses = [thinned(list(enumerate(one.losses, 1)), 80) for one in outcomes]
    yield from _curves("training loss over samples", "samples", outcomes, _Box(_MARGIN, curves, half, _PLOT),
                       [[(update * one.job.samples_per_update, loss) for update, loss in line]
                        for one, line in zip(outcomes, losses, strict=True)])
    yield from _curves("training loss over time", "s", outcomes, _Box(right, curves, half, _PLOT),
                       [[(update * one.update_s, loss) for update, loss in line] if one.update_s is not None else []
                        for one, line in zip(outcomes, losses, strict=True)])
    for line, (name, why) in enumerate(comparison.refused.items()):
        yield _text(_MARGIN, curves + _PLOT + 52 + 18 * line, f"{name} does not take part: {why.splitlines()[0]}",
                    "soft")
    yield "</svg>"


def _colours(colours: Sequence[str]) -> str:
    return "".join(f".c{i}{{fill:{colour}}}.s{i}{{stroke:{colour};fill:none;stroke-width:2}}"
                   f".o{i}{{stroke:{colour};fill:{colour};fill-opacity:.25}}" for i, colour in enumerate(colours))


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "", style: str = "") -> str:
    named = {"class": kind, "text-anchor": anchor, "style": style}
    more = "".join(f' {name}="{value}"' for name, value in named.items() if value)
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _bar(kind: str, box: _Box, title: str) -> str:
    return (f'<rect class="{kind}" x="{box.x}" y="{box.y}" width="{box.width:.1f}" height="{box.height}" rx="3">'
            f"<title>{escape(title)}</title></rect>")


def _names(outcomes: Sequence[Outcome], box: _Box) -> tuple[float, list[str]]:
    """Return where the bars begin, and the names left of them."""
    left = box.x + min(box.width / 2, max(92, 16 + _LETTER * max(len(one.name) for one in outcomes)))
    return left, [_text(left - 8, box.y + i * _ROW + _BAR + 4, one.name, anchor="end")
                  for i, one in enumerate(outcomes)]


def _throughput(outcomes: Sequence[Outcome], box: _Box) -> Iterator[str]:
    yield _text(box.x, box.y - 10, "samples per second", "head")
    left, names = _names(outcomes, box)
    yield from names
    most = max([speed * (1 + (one.spread or 0)) for one in outcomes if (speed := one.samples_per_s) is not None],
               default=1)
    for i, one in enumerate(outcomes):
        y, speed, ratio = box.y + i * _ROW, one.samples_per_s, one.relative_speed(outcomes[0])
        if speed is None:
            yield _text(left + 6, y + _BAR + 4, "-")
            continue
        width = speed * (box.x + box.width - left - 96) / most
        spread = (one.spread or 0) * width
        more = "" if one.spread is None else f", spread {100 * one.spread:.1f} %"
        yield _bar(f"c{i % len(_COLOURS)}", _Box(left, y, width, 2 * _BAR), f"{one.name}: {speed:.2f} samples/s{more}")
        if more:
            yield (f'<line class="whisker" x1="{left + width - spread:.1f}" x2="{left + width + spread:.1f}" '
                   f'y1="{y + _BAR}" y2="{y + _BAR}"/>')
        yield _text(left + width + spread + 6, y + _BAR + 4,
                    f"{speed:.1f}" + ("" if i == 0 or ratio is None else f", {ratio:.2f}x"))


def _memory(comparison: Comparison, box: _Box) -> Iterator[str]:
    outcomes, limit = comparison.outcomes, comparison.memory_bytes
    predicted = any(one.predicted_bytes is not None for one in outcomes)
    yield _text(box.x, box.y - 10, f"kept tensors of the fullest rank{', and predicted (pale)' * predicted}", "head")
    left, names = _names(outcomes, box)
    yield from names
    sizes = [size for one in outcomes for size in (one.peak_bytes, one.predicted_bytes) if size is not None]
    if limit is not None and limit >= 3 * max(sizes):
        limit = None  # it would squeeze the bars
    scale = (box.x + box.width - left - 84) / max(*sizes, limit or 0, 1)
    for i, one in enumerate(outcomes):
        pairs = (("c", one.peak_bytes, "counted"), ("o", one.predicted_bytes, "predicted"))
        for row, (kind, size, what) in enumerate(pairs):
            if size is not None:
                y = box.y + i * _ROW + (row * _BAR if predicted else _BAR / 2)
                yield _bar(f"{kind}{i % len(_COLOURS)}", _Box(left, y, size * scale, _BAR - 1),
                           f"{one.name}, {what}: {size_text(size)}")
                yield _text(left + size * scale + 6, y + 14, size_text(size), "soft")
    if limit is not None:
        x = left + limit * scale
        yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{box.y - 4}" y2="{box.y + box.height - 12}"/>'
        yield _text(x, box.y + box.height, f"limit {size_text(limit)}", "soft small", "middle")


def _curves(head: str, unit: str, outcomes: Sequence[Outcome], box: _Box,
            lines: Sequence[Sequence[tuple[float, float]]]) -> Iterator[str]:
    yield _text(box.x, box.y - 12, head, "head")
    points = [point for line in lines for point in line if math.isfinite(point[1])]
    if not points:
        yield _text(box.x, box.y + 20, "no loss is a number" if any(lines) else "no update after the warm-up", "soft")
        return
    right, left = max(x for x, _ in points), box.x + 44
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + 1
    across, up = (box.width - 60) / right, box.height / (high - low)
    for tick in _ticks(low, high):
        y = box.y + (high - tick) * up
        yield f'<line class="line" x1="{left}" x2="{left + right * across:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(left - 6, y + 3, f"{tick:g}", "soft small", "end")
    for tick in _ticks(0, right):
        yield _text(left + tick * across, box.y + box.height + 16, f"{tick:,.10g}", "soft small", "middle")
    yield _text(left + right * across, box.y + box.height + 30, unit, "soft small", "end")
    for i, (one, line) in enumerate(zip(outcomes, lines, strict=True)):
        path = " ".join(f"{left + x * across:.1f},{box.y + (high - y) * up:.1f}" for x, y in line if math.isfinite(y))
        yield f'<polyline class="s{i % len(_COLOURS)}" points="{path}"><title>{escape(one.name)}</title></polyline>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers between two."""
    step = tick_of((high - low) / 4)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
