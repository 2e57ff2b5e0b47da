"""Slices of sequences beside whole ones, in seconds and in bytes: see README.md beside this file.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/slices/run.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from vpipe import Cut, Order, Pipeline
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.distributed import join_world
from vpipe.runtime.microbatches import Batch
from vpipe.schedules.trace import RecordedAction

sys.path.insert(0, str(Path(__file__).parent.parent / "throughput"))

from machine import description

BLOCKS, HIDDEN, HEADS, WORDS, TOKENS = 4, 256, 4, 512, 1024
UPDATES, ROUNDS = 3, 5
"""Of a turn of each order, the first update of which does not count; and how many turns each has."""

ORDERS = (Order("1f1b"), *(Order("seq1f1b", slices=slices) for slices in (2, 4, 8)))


def pipeline(order: Order, microbatches: int) -> Pipeline:
    """A GPT, its attentions and MLPs shared evenly: its embeddings and its head are small."""
    model = family_named("gpt").model(ModelSettings(
        vocab_size=WORDS, hidden_size=HIDDEN, num_layers=BLOCKS, num_heads=HEADS, sequence_length=TOKENS, dropout=0.0))
    ranks = dist.get_world_size()
    halves = 2 * BLOCKS // ranks
    cut = Cut([halves] * (ranks - 1) + [halves + 1])
    return Pipeline(model, partial(torch.optim.AdamW, lr=1e-4), cut, order, microbatches)


def seconds(pipe: Pipeline, batch: Batch) -> list[float]:
    """Of the updates of a turn."""

    def batches() -> Iterator[Batch]:
        for _ in range(UPDATES):
            yield batch

    ends = [perf_counter()]
    for _ in pipe.train(batches()):
        ends.append(perf_counter())
    return [after - before for before, after in pairwise(ends)][1:]


def activations_mb(pipe: Pipeline, batch: Batch) -> float:
    """The most activations that this rank's stage holds in an update, as counted tensor by tensor."""
    recorder, = pipe.engine.record(limit=100_000).values()
    seconds(pipe, batch)
    return max(record.held_bytes for record in recorder.pop_records() if isinstance(record, RecordedAction)) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    join_world()
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        print(description())
        print("| ranks | microbatches | slices | ms per update | min | over whole: median | activations by rank, MB |")
        print("|---:|---:|---:|---:|---:|---:|---|")
    for microbatches in (ranks, 4 * ranks):
        drawn = torch.randint(WORDS, (microbatches, TOKENS + 1), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
        pipes = [pipeline(order, microbatches) for order in ORDERS]
        took: list[list[list[float]]] = [[] for _ in ORDERS]
        for turn in range(ROUNDS):
            for at in range(len(ORDERS)):
                order = (at + turn) % len(ORDERS)
                took[order].append(seconds(pipes[order], batch))
        for order, pipe, own in zip(ORDERS, pipes, took, strict=True):
            held: list[Any] = [None] * ranks
            dist.all_gather_object(held, activations_mb(pipe, batch))
            ratio = median(median(mine) / median(whole) for mine, whole in zip(own, took[0], strict=True))
            every = [update for turn in own for update in turn]
            if dist.get_rank() == 0:
                print(f"| {ranks} | {microbatches} | {order.slices or 1} | {1e3 * median(every):.0f} | "
                      f"{1e3 * min(every):.0f} | {ratio:.3f} | {', '.join(f'{each:.1f}' for each in held)} |",
                      flush=True)


if __name__ == "__main__":
    main()
