"""vpipe against torch.distributed.pipelining and a bare loop, on devices that sleep. See README.md.

python benchmarks/emulated/run.py [--only REGEX] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from awake import awake
from bare_systems import bare_systems
from case import CASES, Case
from machine import description
from orders import ORDERS
from ranks import FORK, UPDATES, measure
from streams import PEERS, STREAMS, StreamRow, measure_stream
from system import System
from table import Row, rows, stream_text, text
from torch_systems import RIVALS, torch_systems
from vpipe_systems import vpipe_systems


def field(case: Case, only: str) -> list[System]:
    """Those whose ``<case>: <name>`` matches; those of one schedule after each other."""
    places = [order.name for order in ORDERS]
    systems = chain(vpipe_systems(), torch_systems(), bare_systems(FORK, case))
    return sorted((system for system in systems if re.search(only, f"{case}: {system.name}")),
                  key=lambda system: places.index(system.schedule))


def main() -> None:
    """Measure case after case, then print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX",
                        help="only what matches, such as 'P = 4.*20.*1f1b'; names are '<case>: <group> <schedule>', "
                             "and begin with async where asynchronous schedules are measured or compared")
    parser.add_argument("--turns", type=int, help=f"of every system, {UPDATES} updates each")
    parser.add_argument("--json", type=Path, help="write the figures there, too; cases that are there already stay")
    parser.add_argument("--idle", action="store_true", help="let processors idle while devices sleep; see awake.py")
    options = parser.parse_args()
    saved: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    saved = {"machine": description(), "command": sys.argv, "cases": {}, **saved}

    def once(name: str, measured: Callable[[], list[Any]]) -> None:
        if name in saved["cases"]:
            return
        print(name, flush=True)
        with nullcontext() if options.idle else awake():
            saved["cases"][name] = [asdict(row) for row in measured()]
        if options.json:
            options.json.write_text(json.dumps(saved, indent=1) + "\n")

    for case in (replace(case, turns=options.turns or case.turns) for case in CASES):
        if systems := field(case, options.only):
            once(f"{case}: {', '.join(system.name for system in systems)}",
                 lambda case=case, systems=systems: rows(case, measure(case, systems)))
    for stream in STREAMS:
        for system in ("bare", "vpipe") if (stream.update_every, stream.extra) == (1, 1) else ("vpipe",):
            if re.search(options.only, name := f"{stream}: {system} pipedream"):
                once(name, lambda stream=stream, system=system: [measure_stream(stream, system)])
    for case in PEERS:
        rivals = [system for system in torch_systems()
                  if system.schedule in RIVALS and re.search(options.only, f"async {case}: {system.name}")]
        if rivals:
            once(f"async {case}: {', '.join(system.name for system in rivals)}",
                 lambda case=case, rivals=rivals: rows(case, measure(case, rivals)))

    if not saved["cases"]:
        raise SystemExit(f"nothing matches '{options.only}'")
    synchronous = [Row(**row) for name, found in saved["cases"].items() if not name.startswith("async")
                   for row in found]
    streams = [StreamRow(**row) for found in saved["cases"].values() for row in found if "stream" in row]
    rivals_of = [Row(**row) for name, found in saved["cases"].items() if name.startswith("async")
                 for row in found if "stream" not in row]
    if synchronous:
        print(f"\nms per update: median (least); CPU ms of all ranks\n\n{text(synchronous)}")
    if streams or rivals_of:
        print(f"\n{stream_text(streams, rivals_of)}")
    print(f"\n{description()}\n{' '.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
