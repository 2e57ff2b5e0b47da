"""vpipe against torch.distributed.pipelining and a bare loop, on devices that sleep. See README.md.

python benchmarks/emulated/run.py [--only REGEX] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from bare_entrants import bare_entrants
from case import CASES, Case
from entrant import Entrant
from machine import description
from ranks import FORK, UPDATES, measure
from table import rows, text
from torch_entrants import torch_entrants
from vpipe_entrants import vpipe_entrants


def field(case: Case, only: str) -> list[Entrant]:
    """Those whose ``<case>: <name>`` matches; those of one schedule after each other."""
    groups = (vpipe_entrants(), torch_entrants(), bare_entrants(FORK, case))
    return [entrant for entrant in chain.from_iterable(zip(*groups, strict=True))
            if re.search(only, f"{case}: {entrant.name}")]


def main() -> None:
    """Measure case after case, then print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX",
                        help="only what matches, such as 'P = 4.*20.*1f1b'; names are '<case>: <group> <schedule>'")
    parser.add_argument("--turns", type=int, help=f"of every entrant, {UPDATES} updates each")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    cases = [replace(case, turns=options.turns or case.turns) for case in CASES]
    contest = [(case, entrants) for case in cases if (entrants := field(case, options.only))]
    if not contest:
        raise SystemExit(f"nothing matches '{options.only}'")
    table = []
    for case, entrants in contest:
        print(f"{case}: {len(entrants)} entrants, {case.turns} turns of {UPDATES} updates", flush=True)
        table += rows(case, measure(case, entrants))
    print(f"\nms per update: median (least); CPU ms of all ranks\n\n{text(table)}\n\n{description()}\n"
          f"{' '.join(['python', *sys.argv])}")
    if options.json:
        options.json.write_text(json.dumps({"machine": description(), "command": sys.argv,
                                            "rows": [asdict(row) for row in table]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
