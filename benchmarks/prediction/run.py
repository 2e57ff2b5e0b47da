"""Predicted and measured time of a step, and bytes held, of models, ranks and schedules. See README.md.

python benchmarks/prediction/run.py [--rounds N] [--batches N] [--worlds bert2,gpt2,...] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter

from cases import description
from rank import work
from table import details, table, verdict
from world import run_world

WORLDS = ("bert2", "gpt2", "bert4", "gpt4")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of a profile and every setting")
    parser.add_argument("--batches", type=int, default=4, help="of a setting that count, per round")
    parser.add_argument("--worlds", default=",".join(WORLDS), help=f"of {', '.join(WORLDS)}: model and ranks")
    parser.add_argument("--only", default="", metavar="TEXT", help="only settings with this text in their names")
    parser.add_argument("--details", action="store_true", help="also every kind of action of every stage")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser.parse_args()


def main() -> None:
    """As the parent: start world after world, print what they found. As a rank: work."""
    options = arguments()
    worlds = options.worlds.split(",")
    if unknown := [world for world in worlds if world not in WORLDS]:
        raise SystemExit(f"no world is called {unknown[0]}: {', '.join(WORLDS)}")
    if "PREDICTION_OUT" in os.environ:
        work(os.environ["PREDICTION_CASE"], options.rounds, options.batches, options.only,
             Path(os.environ["PREDICTION_OUT"]))
    started, found = perf_counter(), []
    print(description(), flush=True)
    for world in worlds:
        found += run_world(sys.argv, world[:-1], int(world[-1]), timeout_s=600.0 * options.rounds)
        print(table(found), flush=True)
    if options.details:
        print(details(found))
    print(f"\n{verdict(found)}\n{perf_counter() - started:.0f} s\n{description()}\n{' '.join(['python', *sys.argv])}")
    if options.json:
        options.json.write_text(json.dumps({"machine": description(), "command": sys.argv, "found": found},
                                           indent=1) + "\n")


if __name__ == "__main__":
    main()
