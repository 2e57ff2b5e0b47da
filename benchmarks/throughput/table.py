"""The results as a table."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from batches import SAMPLES
from model import TOKENS
from system import System

CLOSE = {"fp32": 2e-3, "bf16": 1e-2}
"""Greatest relative difference of losses: rounding, and what AdamW makes of it in a few updates."""
COMPARED = 4
DISTURBED = 0.1
"""Share of the machine that others may use in a turn that counts."""
ENOUGH = 3
"""Undisturbed turns below which all are taken."""


@dataclass(frozen=True)
class Row:
    """One system's figures.

    Attributes:
        median_s: per update, over the turns that count.
        least_s: of those turns.
        cpu_s: processor time per update, both ranks (median).
        turns: how many counted.
        disturbed: how many did not, because others used the machine; 0 when there were too few others to choose from.
        losses: by update.
        exact: whether they should be those of plain training.
    """

    name: str
    group: str
    median_s: float
    least_s: float
    cpu_s: float
    turns: int
    disturbed: int
    losses: tuple[float, ...]
    exact: bool


def rows(systems: list[System], cores: int, per_rank: list[dict[str, dict[str, list[float]]]]) -> list[Row]:
    """From what the ranks wrote: times as rank 0 saw them, losses from whoever knows them."""
    made = []
    for system in systems:
        own: list[dict[str, Any]] = [rank[system.name] for rank in per_rank]
        cpu = [sum(turn) for turn in zip(*(rank["cpu_seconds"] for rank in own if rank["cpu_seconds"]), strict=True)]
        turns = list(zip(own[0]["seconds"], cpu, own[0]["busy_seconds"], strict=True))
        quiet = [turn for turn in turns if (turn[2] - turn[1]) / (turn[0] * cores) < DISTURBED]
        used = quiet if len(quiet) >= ENOUGH else turns
        seconds = [turn[0] for turn in used]
        losses = next((rank["losses"] for rank in own if rank["losses"]), [])
        made.append(Row(system.name, system.group, median(seconds), min(seconds), median(turn[1] for turn in used),
                        len(used), len(turns) - len(used), tuple(losses), system.exact))
    return made


def check_losses(table: list[Row], precision: str) -> str:
    """Whether all systems that should did the same work; a line that says so.

    Raises:
        SystemExit: the losses of two systems differ by more than rounding.
    """
    exact = [row for row in table if row.exact and row.losses]
    if not exact:
        return "losses: no systems to compare"
    first, worst = exact[0], 0.0
    for row in exact:
        for i, (one, other) in enumerate(zip(first.losses[:COMPARED], row.losses[:COMPARED], strict=True)):
            worst = max(worst, abs(one - other) / one)
            if worst > CLOSE[precision]:
                raise SystemExit(f"not the same work: at update {i} the loss of {first.name} is {one}, "
                                 f"of {row.name} {other}")
    return (f"losses: {len(exact)} systems agree over the first {COMPARED} updates ({first.losses[0]:.6f} .. "
            f"{first.losses[COMPARED - 1]:.6f}, greatest relative difference {worst:.1e})")


def text(table: list[Row]) -> str:
    """A Markdown table, fastest first: medians over the turns that count."""
    best = min((row.median_s for row in table if row.group == "torch"), default=None)
    lines = ["| system | ms per update | min | CPU ms of both ranks | tokens/s | speed, torch's best = 1 | turns |",
             "|---|---:|---:|---:|---:|---:|---:|"]
    for row in sorted(table, key=lambda row: row.median_s):
        ratio = f"{best / row.median_s:.2f}" if best else "-"
        lines.append(f"| {row.name} | {row.median_s * 1e3:.0f} | {row.least_s * 1e3:.0f} | "
                     f"{row.cpu_s * 1e3:.0f} | {SAMPLES * TOKENS / row.median_s:,.0f} | {ratio} | "
                     f"{row.turns} of {row.turns + row.disturbed} |")
    return "\n".join(lines)
