"""The figures, setting by setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Found = dict[str, Any]

MEDIAN, WORST, MEMORY = 0.07, 0.20, 0.05
"""What errors are aimed at: of the time of a step, the median and the worst; of bytes, the worst."""


@dataclass(frozen=True)
class Row:
    """A setting, over all rounds.

    Attributes:
        predicted_s, measured_s: of a step; medians over rounds, and over all steps.
        held_error: the largest, relative, of the bytes that a rank held.
        held_bytes: counted, of the rank with most.
        others: share of the machine's cores that other programs took meanwhile, at most.
    """

    name: str
    predicted_s: float
    measured_s: float
    held_error: float
    held_bytes: int
    others: float

    @property
    def error(self) -> float:
        """Of the time, relative; above 0 where it was expected to take longer."""
        return self.predicted_s / self.measured_s - 1


def rows(found: Sequence[Found]) -> list[Row]:
    """One per setting, in the order in which they ran."""
    return [Row(name, median(one["predicted_s"] for one in group),
                median(seconds for one in group for seconds in one["step_s"]),
                max((expected / held - 1 for one in group
                     for expected, held in zip(one["predicted_held"], one["held"], strict=True)), key=abs),
                max(held for one in group for held in one["held"]), max(one["others"] for one in group))
            for name, group in _grouped(found)]


def table(found: Sequence[Found]) -> str:
    """As Markdown."""
    lines = ["| model, ranks, schedule | predicted | measured | error | held at most | error | others |",
             "|---|---:|---:|---:|---:|---:|---:|"]
    lines += [f"| {row.name} | {1e3 * row.predicted_s:.0f} ms | {1e3 * row.measured_s:.0f} ms | {row.error:+.1%} | "
              f"{row.held_bytes / 1e6:.1f} MB | {row.held_error:+.2%} | {row.others:.0%} |" for row in rows(found)]
    return "\n".join(lines)


def verdict(found: Sequence[Found]) -> str:
    """The errors against what they are aimed at."""
    every = rows(found)
    errors = sorted(abs(row.error) for row in every)
    bytes_error = max(abs(row.held_error) for row in every)
    return (f"{len(every)} settings. Time of a step: median error {median(errors):.1%} (aim {MEDIAN:.0%}), worst "
            f"{errors[-1]:.1%} (aim {WORST:.0%}). Bytes held: worst error {bytes_error:.2%} (aim {MEMORY:.0%}).")


def details(found: Sequence[Found]) -> str:
    """Every kind of action of every stage: predicted and measured, ms of a core."""
    lines = ["", "| setting | action | predicted | measured | error |", "|---|---|---:|---:|---:|"]
    for name, group in _grouped(found):
        for key in sorted(group[0]["ops"]):
            measured = median(one["ops"][key] for one in group)
            expected = median(one["predicted_ops"].get(key, 0.0) for one in group)
            error = f"{expected / measured - 1:+.1%}" if expected and measured else ""
            lines.append(f"| {name} | {key} | {1e3 * expected:.2f} | {1e3 * measured:.2f} | {error} |")
    return "\n".join(lines)


def _grouped(found: Sequence[Found]) -> Iterable[tuple[str, list[Found]]]:
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(f"{one['case']}, {one['ranks']}, {one['setting']}", []).append(one)
    return groups.items()
