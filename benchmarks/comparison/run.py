"""GPipe, PipeDream and vpipe on 8 emulated GPUs of 11 GB, BERT-large. See README.md.

python benchmarks/comparison/run.py [--simulate] [--slower FACTOR] [--batches N] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from case import Case, Run, runs
from gpu import CURVES, PUBLISHED
from machine import description
from ranks import measure
from table import Runs, parts, ratios, results, title

RUN = {"like with like": Case(), "as published": Case(as_published=True, step_passes=4)}
"""What is run, too."""
SIMULATED = {
    **{f"{tokens} tokens, curve {curve.name}": Case(tokens, curve) for tokens in (128, 512) for curve in CURVES},
    **{f"{tokens} tokens, as published, {passes:g} x the time of fused Adam":
       Case(tokens, PUBLISHED, as_published=True, step_passes=passes) for tokens in (128, 512) for passes in (1, 4)}}


def main() -> None:
    """Plan all, simulate all, run two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="run nothing")
    parser.add_argument("--slower", type=float, default=1.5, help="seconds that a second of a GPU takes here")
    parser.add_argument("--batches", type=int, default=10, help="of 512 samples, per system, two in a turn; the first "
                        "of a turn does not count, nor the two before the turns and the last turn")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    simulated: dict[str, Runs] = {}
    for name, case in SIMULATED.items():
        print(f"planning: {name}", flush=True)
        simulated[name] = runs(case)
    figures = {}
    for name, case in RUN.items():
        found = runs(case)
        field = [run.contender() for run in found.values() if isinstance(run, Run)]
        print(f"running: {name}", flush=True)
        measured = {} if options.simulate else measure(field, options.slower, options.batches)
        figures[name] = measured
        print(f"\n{name}: {title(case)}\n\n{results(found, measured)}\n\n{parts(found)}\n", flush=True)
    print(f"simulated:\n\n{ratios(simulated)}\n\n{description()}\n{' '.join(['python', *sys.argv])}")
    if options.json:
        options.json.write_text(json.dumps({
            "machine": description(), "command": sys.argv, "measured_samples_per_s": figures,
            "simulated_samples_per_s": {name: {system: None if isinstance(run, str) else run.samples_per_s
                                               for system, run in found.items()}
                                        for name, found in simulated.items()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
