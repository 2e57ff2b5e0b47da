"""The loss after equal samples, for every way and seed; the two stages take turns in one process.

A run over gloo gives the same numbers to the bit (the tests of vpipe/extras/compression), only later.
"""

from __future__ import annotations

import multiprocessing
import sys
from itertools import islice
from statistics import mean

import torch
from task import WAYS, Way, batches, pipeline

UPDATES, LAST = 200, 20
HELD_OUT = 1_000_000
"""Seed of what is evaluated on: stretches of the same text, so this tells ways apart, not models."""


def learn(run: tuple[Way, int]) -> tuple[float, float]:
    """Mean loss of the last updates, and loss on held-out batches, of a way and a seed."""
    way, seed = run
    torch.set_num_threads(1)
    pipe = pipeline(way, seed)
    losses = [step.loss for step in pipe.train(islice(batches(seed), UPDATES))]
    return mean(losses[-LAST:]), pipe.evaluate(islice(batches(HELD_OUT), 16))


def measure(seeds: int, processes: int) -> str:
    """A Markdown table: losses of every way, and how far they are from those of ``none``, seed by seed."""
    runs = [(way, seed) for seed in range(seeds) for way in WAYS]
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        results = {}
        for run, result in zip(runs, pool.imap(learn, runs), strict=True):
            results[run] = result
            print(f"{run[0].name}, seed {run[1]}: {result[0]:.4f}, held out {result[1]:.4f}", file=sys.stderr,
                  flush=True)
    lines = [f"{UPDATES} updates, {seeds} seeds\n",
             f"| way | loss of the last {LAST} updates | minus none, by seed | held out | minus none, by seed |",
             "|---|---:|---|---:|---|"]
    for way in WAYS:
        cells = []
        for figure in (0, 1):
            values = [results[way, seed][figure] for seed in range(seeds)]
            apart = [value - results[WAYS[0], seed][figure] for seed, value in enumerate(values)]
            cells += [f"{mean(values):.4f}", ", ".join(f"{difference:+.4f}" for difference in apart)]
        lines.append(f"| {way.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
