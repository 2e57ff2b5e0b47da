"""Two replicas of a heavy stage against one, on devices that sleep. See README.md.

python benchmarks/replicas/run.py [--turns N] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parent.parent / "emulated"))
sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from device import Times
from machine import description
from setup import Setup
from worlds import measure

ONE, TWO = (1, 1), (2, 1)
SCHEDULES = ("1f1b", "pipedream")
LIGHT = [Times(Fraction(f, 1000), Fraction(2 * f, 1000)) for f in (5, 20)]


def text(measured: Mapping[Setup, Sequence[float]]) -> str:
    """A Markdown table: medians, with minima behind them."""
    lines = ["| stage 1 | schedule | 1-1: formula | measured | 2-1: formula | measured | speed-up: simulated | "
             "measured | ratio |", "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for light in LIGHT:
        for schedule in SCHEDULES:
            one, two = (Setup(schedule, widths, light) for widths in (ONE, TWO))
            simulated = one.formula_s() / two.formula_s()
            reached = median(measured[one]) / median(measured[two])
            cells = [str(light), schedule]
            for system in (one, two):
                times = measured[system]
                cells += [f"{system.formula_s() * 1e3:.0f}", f"{median(times) * 1e3:.0f} ({min(times) * 1e3:.0f})"]
            cells += [f"{simulated:.3f}", f"{reached:.3f}", f"{reached / simulated:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="of every system")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    measured: dict[Setup, list[float]] = {}
    for light in LIGHT:
        for schedule in SCHEDULES:
            systems = [Setup(schedule, widths, light) for widths in (ONE, TWO)]
            print(f"{systems[0]} and {systems[1]}: {options.turns} turns", flush=True)
            measured |= measure(systems, options.turns)
    print(f"\nms per turn: median (least)\n\n{text(measured)}\n\n{description()}\n{' '.join(['python', *sys.argv])}")
    if options.json:
        options.json.write_text(json.dumps({"machine": description(), "command": sys.argv,
                                            "turns_s": {str(one): times for one, times in measured.items()}},
                                           indent=1) + "\n")


if __name__ == "__main__":
    main()
