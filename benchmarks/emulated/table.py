"""The results as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from case import Case
from orders import ORDERS
from streams import StreamRow

GROUPS = ("vpipe", "torch", "bare")


@dataclass(frozen=True)
class Row:
    """One schedule in one case.

    Attributes:
        case: which.
        schedule: vpipe's name.
        formula_s: an update, if messages and programs took no time; 0 beside torch alone.
        median_s: of an update, by group.
        least_s: likewise.
        cpu_s: processor seconds of all ranks for an update (median), by group.
        turns: of each.
    """

    case: str
    schedule: str
    formula_s: float
    median_s: Mapping[str, float]
    least_s: Mapping[str, float]
    cpu_s: Mapping[str, float]
    turns: int


def rows(case: Case, measured: Mapping[str, Sequence[tuple[float, float]]]) -> list[Row]:
    """From what the systems took, by name and turn."""
    made = []
    for order in ORDERS:
        own = {group: list(zip(*measured[name], strict=True)) for group in GROUPS
               if (name := f"{group} {order.name}") in measured}
        if own:
            # Alone torch may have fewer microbatches than the formula's schedule takes.
            formula_s = 0.0 if own.keys() == {"torch"} else order.formula_s(case)
            made.append(Row(str(case), order.name, formula_s,
                            {group: median(seconds) for group, (seconds, _) in own.items()},
                            {group: min(seconds) for group, (seconds, _) in own.items()},
                            {group: median(cpu) for group, (_, cpu) in own.items()}, case.turns))
    return made


def text(table: Sequence[Row]) -> str:
    """A Markdown table: medians, with minima behind them."""
    lines = ["| devices | schedule | formula | bare loop | vpipe | torch | vpipe/torch | vpipe/bare | "
             "CPU vpipe | torch |",
             "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for row in table:
        figures = [f"{row.median_s[group] * 1e3:.1f} ({row.least_s[group] * 1e3:.1f})" if group in row.median_s else "-"
                   for group in ("bare", "vpipe", "torch")]
        cpu = [f"{row.cpu_s[group] * 1e3:.0f}" if group in row.cpu_s else "-" for group in ("vpipe", "torch")]
        cells = [row.case, row.schedule, f"{row.formula_s * 1e3:.1f}", *figures, _ratio(row, "torch"),
                 _ratio(row, "bare"), *cpu]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(row: Row, other: str) -> str:
    if "vpipe" not in row.median_s or other not in row.median_s:
        return "-"
    return f"{row.median_s['vpipe'] / row.median_s[other]:.3f}"


def stream_text(streams: Sequence[StreamRow], rivals: Sequence[Row]) -> str:
    """Two tables: periods of asynchronous schedules against the ideal, and their time against torch's best."""
    bare = {(row.ranks, row.times): row for row in streams if row.system == "bare"}
    lines = ["ms per update in the steady state: median (least) of windows; CPU ms of all ranks", "",
             "| devices | ideal | bare loop | vpipe pipedream | vpipe/ideal | vpipe/bare | CPU |",
             "|---|---:|---:|---:|---:|---:|---:|"]
    own: dict[int, float] = {}  # per rank count, the best seconds of a microbatch, at the rivals' times
    for row in (row for row in streams if row.system == "vpipe"):
        took, loop = median(row.seconds), bare.get((row.ranks, row.times))
        loop_s = loop and median(loop.seconds) / loop.update_every * row.update_every
        lines.append(f"| {row.stream.removeprefix('async ')} | {row.ideal_s * 1e3:.0f} | "
                     f"{f'{loop_s * 1e3:.1f}' if loop_s else '-'} | {took * 1e3:.1f} ({min(row.seconds) * 1e3:.1f}) | "
                     f"{took / row.ideal_s:.3f} | {f'{took / loop_s:.3f}' if loop_s else '-'} | "
                     f"{median(row.cpu_s) * 1e3:.1f} |")
        if rivals and rivals[0].case.endswith(row.times) and row.update_every > 1:
            own[row.ranks] = min(own.get(row.ranks, 1e9), took / row.update_every)
    if own:
        lines += ["", "ms per update of m microbatches: torch's best schedule, and pipedream (k = P) for as many "
                  "microbatches", "", "| m | torch's best | ms | pipedream | faster by |", "|---|---|---:|---:|---:|"]
    for case in dict.fromkeys(row.case for row in rivals if own):
        best = min((row for row in rivals if row.case == case), key=lambda row: row.median_s["torch"])
        ranks, microbatches = (int(part.split(" = ")[1]) for part in case.split(", ")[:2])
        if ranks in own:
            lines.append(f"| {case} | {best.schedule} | {best.median_s['torch'] * 1e3:.0f} | "
                         f"{own[ranks] * microbatches * 1e3:.0f} | "
                         f"{best.median_s['torch'] / (own[ranks] * microbatches):.2f} |")
    return "\n".join(lines)
