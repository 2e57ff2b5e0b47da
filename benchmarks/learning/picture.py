"""Draw the training loss over simulated time: a panel per number of devices, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from arms import DEPTHS, EXPONENT, Arm, arms
from results import Results
from times import update_s

from vpipe.app.visualize.svg import tick_of

WIDTH, HEIGHT, PANEL, LEFT, TOP, PLOT_HEIGHT = 960, 440, 420, 52, 76, 250
LOW, HIGH = 1.5, 3.0
"""Loss shown."""
COLOURS = ("#3b7dd8", "#a45cc9", "#2a9d6f", "#d9622b", "#8a7a2e")
DARK_COLOURS = ("#6ea8fe", "#c79be8", "#63c48d", "#ff9e64", "#cbb95e")
STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328;font-size:12px}
.bg{fill:#fff}.soft{fill:#59636e}.line{stroke:#d1d9e0}.other{stroke:#8c959f;stroke-opacity:.38;fill:none}
polyline{stroke-linejoin:round}.head{font-size:13px;font-weight:600}
"""
DARK = """text{fill:#e6edf3}.bg{fill:#0d1117}.soft{fill:#9198a1}.line{stroke:#30363d}
.other{stroke:#9198a1;stroke-opacity:.33}"""


class Highlight(NamedTuple):
    """Arms of which the fastest is drawn in a colour."""

    name: str
    schedule: str
    optimizer: str
    correction: str


HIGHLIGHTS = (
    Highlight("1F1B, Muon", "1f1b", "muon", "none"), Highlight("ZB-V, Muon", "zb_v", "muon", "none"),
    Highlight("auto, Muon", "auto", "muon", "none"),
    Highlight("pipedream, Muon + extrapolation", "pipedream", "muon", "extrapolate"),
    Highlight("1F1B, AdamW", "1f1b", "adamw", "none"))


def draw(results: Results) -> str:
    """Return the picture as the text of an SVG file."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'role="img" style="max-width:100%;height:auto">')
    yield "<title>Training loss over simulated time, synchronous and asynchronous</title>"
    yield f"<style>{STYLE}{_colours(COLOURS)}\n@media(prefers-color-scheme:dark){{{DARK}{_colours(DARK_COLOURS)}}}"
    yield "</style>"
    yield f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}"/>'
    yield _text(20, 26, "Training loss over time, the same tokens in every run", style="font-size:16px;font-weight:600")
    yield _text(20, 44, "a small GPT on Python sources; the time is simulated with measured costs; the best batch of "
                        "each kind in colour, all other arms grey", "soft")
    for place, depth in enumerate(DEPTHS):
        yield from _panel(results, depth, 20 + place * (WIDTH - 40 - PANEL))
    x = 20.0
    for number, highlight in enumerate(HIGHLIGHTS):
        yield f'<line class="s{number}" x1="{x:.0f}" x2="{x + 18:.0f}" y1="{HEIGHT - 22}" y2="{HEIGHT - 22}"/>'
        yield _text(x + 24, HEIGHT - 18, highlight.name)
        x += 46 + 6.4 * len(highlight.name)
    yield "</svg>"


def _panel(results: Results, depth: int, x: float) -> Iterator[str]:
    curves = {arm: curve for arm in arms() if arm.depth == depth and (curve := _curve(results, arm))}
    yield _text(x, TOP - 12, f"{depth} devices", "head")
    if not curves:
        yield _text(x, TOP + 20, "no rows yet", "soft")
        return
    coloured = {_fastest(results, highlight, depth): number for number, highlight in enumerate(HIGHLIGHTS)}
    right = max(curve[-1][0] for arm, curve in curves.items() if arm in coloured) * 1.02
    left, width = x + LEFT - 20, PANEL - LEFT + 20

    def at(point: tuple[float, float]) -> str:
        time, loss = point
        return f"{left + width * time / right:.1f},{TOP + PLOT_HEIGHT * (HIGH - loss) / (HIGH - LOW):.1f}"

    for tick in _ticks(LOW, HIGH):
        y = TOP + PLOT_HEIGHT * (HIGH - tick) / (HIGH - LOW)
        yield f'<line class="line" x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(left - 6, y + 4, f"{tick:g}", "soft", "end")
    for tick in _ticks(0, right):
        yield _text(left + width * tick / right, TOP + PLOT_HEIGHT + 18, f"{tick:g}", "soft", "middle")
    yield _text(left + width, TOP + PLOT_HEIGHT + 34, "seconds", "soft", "end")
    for arm in sorted(curves, key=lambda arm: arm in coloured):
        shown = _clipped(curves[arm], right)
        if len(shown) > 1:
            style = f"s{coloured[arm]}" if arm in coloured else "other"
            name = f"{arm.schedule}, batch {arm.batch}, {arm.optimizer}, {arm.correction}"
            yield (f'<polyline class="{style}" points="{" ".join(map(at, shown))}"><title>{escape(name)}</title>'
                   "</polyline>")


def _curve(results: Results, arm: Arm) -> list[tuple[float, float]]:
    """Return (seconds, loss) of the run of N with the first seed, smoothed over three points."""
    runs = arm.setting.seeds(results.losses, count=1)
    if not runs or runs[0] not in results.rows:
        return []
    losses: list[float] = results.rows[runs[0]]["curve"]
    end = runs[0].updates * update_s(arm)
    points = []
    for number in range(len(losses)):
        near = losses[max(0, number - 1):number + 2]
        points.append((end * (number + 1) / len(losses), sum(near) / len(near)))
    return points


def _clipped(curve: list[tuple[float, float]], right: float) -> list[tuple[float, float]]:
    """Return the part of a curve that the panel shows."""
    shown: list[tuple[float, float]] = []
    for before, point in zip([curve[0], *curve], curve, strict=False):
        if point[0] > right:
            break
        if point[1] <= HIGH:
            if not shown and before[1] > HIGH:
                share = (before[1] - HIGH) / (before[1] - point[1])
                shown.append((before[0] + share * (point[0] - before[0]), HIGH))
            shown.append(point)
    return shown


def _fastest(results: Results, highlight: Highlight, depth: int) -> Arm | None:
    """Return the arm that reaches L* first, by a guess where that is not known."""
    target = results.targets[depth]

    def time_s(arm: Arm) -> float:
        known, mean = results.to_target_s(arm), arm.setting.mean(results.losses)
        if known is not None or target is None or mean is None:
            return known or math.inf
        return results.time_s(arm) * (mean / target) ** (1 / EXPONENT)

    found = [arm for arm in arms() if (arm.schedule, arm.optimizer, arm.correction) == highlight[1:]
             and arm.depth == depth and time_s(arm) < math.inf]
    return min(found, key=time_s, default=None)


def _ticks(low: float, high: float) -> list[float]:
    step = tick_of((high - low) / 4)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 9) for number in range(first, last + 1)]


def _colours(colours: tuple[str, ...]) -> str:
    return "".join(f".s{number}{{stroke:{colour};fill:none;stroke-width:2.2}}" for number, colour in enumerate(colours))


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "", style: str = "") -> str:
    named = {"class": kind, "text-anchor": anchor, "style": style}
    more = "".join(f' {name}="{value}"' for name, value in named.items() if value)
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'
