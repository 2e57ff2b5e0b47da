"""The results as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from case import Case
from orders import ORDERS

GROUPS = ("vpipe", "torch", "bare")


@dataclass(frozen=True)
class Row:
    """One schedule in one case.

    Attributes:
        case: which.
        schedule: vpipe's name.
        formula_s: an update, if messages and programs took no time.
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
    """From what the entrants took, by name and turn."""
    made = []
    for order in ORDERS:
        own = {group: list(zip(*measured[name], strict=True)) for group in GROUPS
               if (name := f"{group} {order.name}") in measured}
        if own:
            made.append(Row(str(case), order.name, order.formula_s(case),
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
