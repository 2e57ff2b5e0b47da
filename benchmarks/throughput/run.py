"""Throughput of vpipe against torch.distributed.pipelining on two ranks of one thread each. See README.md.

python benchmarks/throughput/run.py [--precision fp32|bf16] [--malloc own|default|raised] [--rounds N] [--only REGEX]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from all_systems import cuts, matching
from machine import description
from precision import BF16, FP32
from processes import GROUPS, RANKS, worlds
from rank import HEAD, TAIL, work
from system import System
from table import Row, check_losses, rows, text

GENEROUS_S = 5.0
"""Per update, for the timeout of a turn."""
STARTS_S = 300.0
"""For the first one of a world, whose ranks start and make the models of all their systems."""
MALLOC = {"own": "vpipe's raised by its launcher's keep_memory, the others' as glibc comes", "default": "default",
          "raised": "raised"}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of every system, after one to warm up")
    parser.add_argument("--steps", type=int, default=4, help="updates per turn that count")
    parser.add_argument("--precision", choices=(FP32, BF16), default=FP32,
                        help="of all systems; bf16: vpipe's bf16 and bf16_pure, the others under autocast")
    parser.add_argument("--malloc", choices=(*MALLOC, "all"), default="all",
                        help="glibc's malloc thresholds: equal for all, or of each its own, in two worlds")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the systems whose names match")
    parser.add_argument("--cuts", action="store_true", help="instead: 1F1B cut in many ways, to find the best cut")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser.parse_args()


def measured(field: list[System], malloc: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """What each of the two ranks wrote of every system; round 0 warms up, then all take turns, round after round."""
    started = time.monotonic()
    timeout_s = STARTS_S + GENEROUS_S * (HEAD + steps + TAIL)
    with worlds(sys.argv, malloc, sorted({system.group for system in field})) as made:
        for number in range(rounds + 1):
            for system in field:
                [world] = [world for world in made if system.group in world.groups]
                world.do({"turn": system.name}, timeout_s)
            if number == 0:
                for world in made:
                    world.do({"forget": "what warmed up"}, timeout_s)
            print(f"  round {number} of {rounds}, {time.monotonic() - started:.0f} s", flush=True)
        for world in made:
            world.do({"write": "results"}, timeout_s)
        of_rank = zip(*(world.results() for world in made), strict=True)
        return [{name: result for part in parts for name, result in part.items()} for parts in of_rank]


def main() -> None:
    """As the parent: start the ranks and print what they measured. As a rank: work."""
    options = arguments()
    field = (cuts if options.cuts else matching)(options.only, options.precision)
    if not field:
        raise SystemExit(f"no system's name matches '{options.only}'")
    if GROUPS in os.environ:
        work([system for system in field if system.group in os.environ[GROUPS].split()], options.steps)
    print(f"{len(field)} systems, {options.rounds} rounds of {options.steps} updates, {options.precision}\n"
          f"{description()}", flush=True)
    tables: dict[str, list[Row]] = {}
    for malloc in MALLOC if options.malloc == "all" else (options.malloc,):
        print(f"malloc thresholds: {MALLOC[malloc]}", flush=True)
        wrote = measured(field, malloc, options.rounds, options.steps)
        assert len(wrote) == RANKS
        tables[malloc] = rows(field, os.cpu_count() or 1, wrote)
        print(check_losses(tables[malloc], options.precision))
    for malloc, table in tables.items():
        print(f"\n{options.precision}, malloc thresholds: {MALLOC[malloc]}\n\n{text(table)}")
    print(f"\n{description()}\n{' '.join(['python', *sys.argv])}")
    if options.json:
        options.json.write_text(json.dumps({
            "machine": description(), "command": sys.argv,
            "tables": {malloc: [asdict(row) for row in table] for malloc, table in tables.items()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
