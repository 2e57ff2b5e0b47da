"""Host cost of a microbatch at a stage, forward and backward. See README.md.

python benchmarks/host/run.py [--optimizer sgd] [--rounds 60] [--profile pipedream]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from machine import description
from systems import BATCH, bare_layers, bare_steps, measure, pipelines, train

OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.01), "adamw": partial(torch.optim.AdamW, lr=1e-3)}
BATCHES = 4
"""Per turn of a system: a pipeline without a flush fills and drains once in them."""


def repeated(batch: Callable[[], None]) -> Callable[[], None]:
    """Return a turn of a bare loop."""
    return lambda: [batch() for _ in range(BATCHES)] and None


def main() -> None:
    """Measure all systems in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", choices=("1f1b", "pipedream"), help="profile that schedule instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    optimizer = OPTIMIZERS[options.optimizer]
    device = torch.device("cpu")
    pipes = pipelines(optimizer, device)
    if options.profile:
        train(pipes[options.profile], BATCH, BATCHES)
        with cProfile.Profile() as profile:
            train(pipes[options.profile], BATCH, 10 * BATCHES)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    systems: dict[str, Callable[[], None]] = {
        "layers alone": repeated(bare_layers(device)),
        f"step alone ({options.optimizer})": repeated(bare_steps(optimizer, device)),
        **{f"vpipe {name}": partial(train, pipe, BATCH, BATCHES) for name, pipe in pipes.items()}}
    print("| us per microbatch and stage | median | least | CPU median | CPU least |\n|---|---:|---:|---:|---:|")
    for name, seconds in measure(systems, options.rounds, BATCHES).items():
        print(f"| {name} | {' | '.join(f'{1e6 * each:.0f}' for each in seconds)} |")
    print(f"\n{description()}\n{' '.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
