"""What saving costs a pipeline, beside torch's own dcp.save and dcp.async_save. See README.md.

python benchmarks/checkpoint/run.py [--turns N] [--json out.json] [--folder DISK]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from machine import description
from processes import run_ranks
from rank import DRAINS_EVERY, STREAM

LONGEST_S = 3600


def text(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: of every turn the slower rank counts."""
    lines = ["| way | pause, s | complete after, s | pause / that | steps held up meanwhile, s | written, MB/s | "
             "read again, MB/s |", "|---|---:|---:|---:|---:|---:|---:|"]
    turns = list(zip(*(rank["saves"] for rank in ranks), strict=True))
    for way in dict.fromkeys(turn["way"] for turn in ranks[0]["saves"]):
        own = [turn for turn in turns if turn[0]["way"] == way]

        def figures(of: Callable[[Mapping[str, Any]], float], own: Sequence[Any] = own) -> list[float]:
            return [max(map(of, turn)) for turn in own]

        size = sum(rank["bytes"] for rank in own[0]) / 1e6
        pauses, saves = figures(lambda turn: turn["pause_s"]), figures(lambda turn: turn["save_s"])
        held_up = figures(lambda turn: turn["held_up_s"])
        share = median(pause / save for pause, save in zip(pauses, saves, strict=True))
        lines.append(f"| {way} | {_words(pauses, 3)} | {_words(saves, 2)} | {share:.1%} | "
                     f"{'-' if not any(held_up) else _words(held_up, 2)} | {size / median(saves):.0f} | "
                     f"{size / median(figures(lambda turn: turn['load_s'])):.0f} |")
    steps = [max(rank["step_s"] for rank in turn) for turn in turns]
    plain, drained = ([max(times) for times in zip(*(rank["drains"][which] for rank in ranks), strict=True)]
                      for which in ("plain", "drained"))
    drains = (STREAM - 1) // DRAINS_EVERY
    costs = [(b - a) / drains for a, b in zip(plain, drained, strict=True)]
    lines += ["", f"{size:.0f} MB a checkpoint; a step takes {median(steps):.2f} s (median)", "",
              f"PipeDream, {STREAM} steps of a microbatch each: {_words(plain, 2)} s without a drain, "
              f"{_words(drained, 2)} s with {drains}: {1e3 * median(costs):.0f} ms a drain, "
              f"{median(costs) / median(plain) * STREAM:.1f} steps"]
    return "\n".join(lines)


def _words(numbers: Sequence[float], digits: int) -> str:
    return f"{median(numbers):.{digits}f} ({min(numbers):.{digits}f} .. {max(numbers):.{digits}f})"


def main() -> None:
    """Measure all, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="of every way")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--folder", type=Path, help="on the disk to save to; the system's for temporary files else")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ranks = run_ranks([str(Path(__file__).parent / "rank.py"), folder, str(options.turns)], "default", LONGEST_S)
    for rank in ranks:
        rank["drains"] = dict(zip(("plain", "drained"), zip(*rank["drains"], strict=True), strict=True))
    print(f"median (least .. most) of {options.turns} turns\n\n{text(ranks)}\n\n{description()}\n"
          f"{' '.join(['python', *sys.argv])}")
    if options.json:
        options.json.write_text(json.dumps({"machine": description(), "command": sys.argv, "ranks": ranks},
                                           indent=1) + "\n")


if __name__ == "__main__":
    main()
