"""Throughput of vpipe against torch.distributed.pipelining on two ranks of one thread each. See README.md.

python benchmarks/throughput/run.py [--rounds N] [--steps N] [--malloc default|raised|both] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from field import contest, cuts
from machine import description
from processes import run_ranks
from rank import HEAD, TAIL, work
from table import Row, check_losses, rows, text

GENEROUS_S = 3.0
"""Per update, for the timeout."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of every entrant, after one to warm up")
    parser.add_argument("--steps", type=int, default=4, help="updates per turn that count")
    parser.add_argument("--malloc", choices=("default", "raised", "both"), default="both",
                        help="glibc's malloc thresholds, for all entrants")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the entrants whose names match")
    parser.add_argument("--cuts", action="store_true", help="instead: 1F1B cut in many ways, to find the best cut")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser.parse_args()


def main() -> None:
    """As the parent: start the ranks and print what they measured. As a rank: work."""
    options = arguments()
    field = (cuts if options.cuts else contest)(options.only)
    if not field:
        raise SystemExit(f"no entrant's name matches '{options.only}'")
    if "THROUGHPUT_OUT" in os.environ:
        work(field, options.rounds, options.steps, Path(os.environ["THROUGHPUT_OUT"]))
    timeout_s = 60 + GENEROUS_S * len(field) * (options.rounds + 1) * (HEAD + options.steps + TAIL)
    print(f"{len(field)} entrants, {options.rounds} rounds of {options.steps} updates\n{description()}", flush=True)
    tables: dict[str, list[Row]] = {}
    for malloc in ("default", "raised") if options.malloc == "both" else (options.malloc,):
        print(f"malloc thresholds: {malloc}", flush=True)
        wrote = run_ranks(sys.argv, malloc, timeout_s)
        tables[malloc] = rows(field, os.cpu_count() or 1, [rank["results"] for rank in wrote])
        print(check_losses(tables[malloc]))
    for malloc, table in tables.items():
        print(f"\nmalloc thresholds: {malloc}\n\n{text(table)}")
    print(f"\n{description()}\n{' '.join(['python', *sys.argv])}")
    if options.json:
        options.json.write_text(json.dumps({
            "machine": description(), "command": sys.argv,
            "tables": {malloc: [asdict(row) for row in table] for malloc, table in tables.items()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
