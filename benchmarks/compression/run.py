"""What compression saves and costs. See README.md.

python benchmarks/compression/run.py codec|gradients|learning|links
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import codec
import gradients
import learning
import links
import task  # noqa: F401  (finds benchmarks/throughput)
import torch
from machine import description


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("codec", "gradients", "learning", "links"))
    parser.add_argument("--seeds", type=int, default=2, help="runs of every way (learning)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every way, after one to warm up (links)")
    return parser.parse_args()


def main() -> None:
    """Measure one part and print its table."""
    options = arguments()
    torch.set_num_threads(1)
    if "COMPRESSION_OUT" in os.environ:
        links.work(options.rounds, Path(os.environ["COMPRESSION_OUT"]))
    tables = {"codec": codec.measure, "gradients": gradients.measure,
              "learning": lambda: learning.measure(options.seeds, os.cpu_count() or 1),
              "links": lambda: links.measure(options.rounds, sys.argv)}
    print(f"{tables[options.part]()}\n\n{description()}\n{' '.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
