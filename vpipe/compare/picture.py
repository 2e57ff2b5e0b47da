"""The comparison as one self-contained SVG, for light and dark backgrounds: throughput, memory, loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from vpipe.compare.outcome import Comparison, Outcome, smoothed
from vpipe.sizes import size_text

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

_WIDTH, _MARGIN, _LEFT, _PLOT = 960, 20, 92, 200
_BAR = 20


@dataclass(frozen=True)
class _Box:
    """Where a panel draws."""

    x: float
    y: float
    width: float
    height: float


def draw(comparison: Comparison) -> str:
    """The picture as the text of an SVG file. There must be an outcome."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    outcomes = comparison.outcomes
    bars = len(outcomes) * (2 * _BAR + 14) + 10
    half = (_WIDTH - 3 * _MARGIN) / 2
    top, right = 84, 2 * _MARGIN + half
    curves = top + bars + 50
    height = curves + _PLOT + 56 + 18 * len(comparison.refused)
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
           f'viewBox="0 0 {_WIDTH} {height}" role="img" style="max-width:100%;height:auto">')
    yield f"<title>{escape(comparison.title)}</title>"
    yield f"<style>{_STYLE}{_colours(_COLOURS)}\n@media(prefers-color-scheme:dark){{{_DARK}{_colours(_DARK_COLOURS)}}}"
    yield "</style>"
    yield f'<rect class="bg" width="{_WIDTH}" height="{height}"/>'
    yield f'<text x="{_MARGIN}" y="26" style="font-size:16px;font-weight:600">{escape(comparison.title)}</text>'
    limit = comparison.memory_bytes
    yield (f'<text class="soft" x="{_MARGIN}" y="44">'
           f'{"no limit on memory" if limit is None else f"each rank may use {size_text(limit)}"}; '
           f"{comparison.equal_updates} updates each</text>")
    if comparison.too_short:
        yield f'<text class="warn" x="{_MARGIN}" y="60">{comparison.too_short}</text>'
    yield from _throughput(outcomes, _Box(_MARGIN, top, half, bars))
    yield from _memory(comparison, _Box(right, top, half, bars))
    yield from _curve("training loss over samples", "samples", outcomes, _Box(_MARGIN, curves, half, _PLOT),
                      [[(update * o.samples_per_update, loss) for update, loss in smoothed(o.losses)]
                       for o in outcomes])
    yield from _curve("training loss over time", "s", outcomes, _Box(right, curves, half, _PLOT),
                      [[] if o.update_s is None else
                       [(update * o.update_s, loss) for update, loss in smoothed(o.losses)] for o in outcomes])
    for line, (name, why) in enumerate(comparison.refused.items()):
        yield (f'<text class="soft" x="{_MARGIN}" y="{curves + _PLOT + 52 + 18 * line}">{escape(name)} does not take '
               f"part: {escape(why.splitlines()[0])}</text>")
    yield "</svg>"


def _colours(colours: Sequence[str]) -> str:
    return "".join(f".c{i}{{fill:{colour}}}.s{i}{{stroke:{colour};fill:none;stroke-width:2}}"
                   f".o{i}{{stroke:{colour};fill:{colour};fill-opacity:.25}}" for i, colour in enumerate(colours))


def _colour(number: int) -> int:
    return number % len(_COLOURS)


def _throughput(outcomes: Sequence[Outcome], box: _Box) -> Iterator[str]:
    yield f'<text class="head" x="{box.x}" y="{box.y - 10}">samples per second</text>'
    most = max([speed * (1 + (outcome.spread or 0)) for outcome in outcomes
                if (speed := outcome.samples_per_s) is not None], default=1)
    scale = (box.width - _LEFT - 96) / most
    for i, outcome in enumerate(outcomes):
        y, x, speed = box.y + i * (2 * _BAR + 14), box.x + _LEFT, outcome.samples_per_s
        yield f'<text x="{x - 8}" y="{y + _BAR + 4}" text-anchor="end">{escape(outcome.name)}</text>'
        if speed is None:
            yield f'<text x="{x + 6}" y="{y + _BAR + 4}">-</text>'
            continue
        width, ratio = speed * scale, outcome.against(outcomes[0])
        spread = (outcome.spread or 0) * width
        said = "" if outcome.spread is None else f", spread {100 * outcome.spread:.1f} %"
        yield (f'<rect class="c{_colour(i)}" x="{x}" y="{y}" width="{width:.1f}" height="{2 * _BAR}" rx="3">'
               f"<title>{escape(outcome.name)}: {speed:.2f} samples/s{said}</title></rect>")
        if said:
            yield (f'<line class="whisker" x1="{x + width - spread:.1f}" x2="{x + width + spread:.1f}" '
                   f'y1="{y + _BAR}" y2="{y + _BAR}"/>')
        yield (f'<text x="{x + width + spread + 6:.1f}" y="{y + _BAR + 4}">{speed:.1f}' +
               ("" if i == 0 or ratio is None else f", {ratio:.2f}x") + "</text>")


def _memory(comparison: Comparison, box: _Box) -> Iterator[str]:
    outcomes, limit = comparison.outcomes, comparison.memory_bytes
    predicted = any(o.predicted_bytes is not None for o in outcomes)
    yield (f'<text class="head" x="{box.x}" y="{box.y - 10}">kept tensors of the fullest rank<tspan class="soft" '
           f'font-weight="400">: counted{", and predicted (pale)" * predicted}</tspan></text>')
    sizes = [size for o in outcomes for size in (o.peak_bytes, o.predicted_bytes) if size is not None]
    # A limit far above all bars is said, not drawn: it would squeeze them.
    drawn = limit is not None and limit < 3 * max(sizes)
    scale = (box.width - _LEFT - 84) / max([*sizes, limit] if drawn and limit is not None else sizes)
    for i, outcome in enumerate(outcomes):
        x, y = box.x + _LEFT, box.y + i * (2 * _BAR + 14)
        yield f'<text x="{box.x + _LEFT - 8}" y="{y + _BAR + 4}" text-anchor="end">{escape(outcome.name)}</text>'
        pairs = (("c", outcome.peak_bytes, "counted"), ("o", outcome.predicted_bytes, "predicted"))
        for row, (kind, size, what) in enumerate(pairs):
            if size is not None:
                at = y + row * _BAR if predicted else y + _BAR / 2
                yield (f'<rect class="{kind}{_colour(i)}" x="{x}" y="{at}" width="{size * scale:.1f}" '
                       f'height="{_BAR - 1}" rx="3"><title>{escape(outcome.name)}, {what}: {size_text(size)}'
                       "</title></rect>")
                yield f'<text class="soft" x="{x + size * scale + 6:.1f}" y="{at + 14}">{size_text(size)}</text>'
    if drawn and limit is not None:
        x = box.x + _LEFT + limit * scale
        yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{box.y - 4}" y2="{box.y + box.height - 12}"/>'
        yield (f'<text class="soft small" x="{x:.1f}" y="{box.y + box.height}" text-anchor="middle">limit '
               f"{size_text(limit)}</text>")


def _curve(head: str, unit: str, outcomes: Sequence[Outcome], box: _Box,
           lines: Sequence[Sequence[tuple[float, float]]]) -> Iterator[str]:
    yield f'<text class="head" x="{box.x}" y="{box.y - 12}">{head}</text>'
    points = [point for line in lines for point in line if math.isfinite(point[1])]
    if not points:
        why = "no loss is a number" if any(lines) else "no update after the warm-up"
        yield f'<text class="soft" x="{box.x}" y="{box.y + 20}">{why}</text>'
        return
    right, left = max(x for x, _ in points), box.x + 44
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + 1
    across, up = (box.width - 60) / right, box.height / (high - low)
    for tick in _ticks(low, high):
        y = box.y + (high - tick) * up
        yield f'<line class="line" x1="{left}" x2="{left + right * across:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="soft small" x="{left - 6}" y="{y + 3:.1f}" text-anchor="end">{tick:g}</text>'
    for tick in _ticks(0, right):
        x = left + tick * across
        yield (f'<text class="soft small" x="{x:.1f}" y="{box.y + box.height + 16}" text-anchor="middle">'
               f"{tick:,.10g}</text>")
    yield (f'<text class="soft small" x="{left + right * across:.1f}" y="{box.y + box.height + 30}" '
           f'text-anchor="end">{unit}</text>')
    for i, (outcome, line) in enumerate(zip(outcomes, lines, strict=True)):
        path = " ".join(f"{left + x * across:.1f},{box.y + (high - y) * up:.1f}" for x, y in line if math.isfinite(y))
        yield f'<polyline class="s{_colour(i)}" points="{path}"><title>{escape(outcome.name)}</title></polyline>'


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers between two."""
    step = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]
