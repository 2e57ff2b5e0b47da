"""What recording a run costs: the same pipeline with and without, in turns, in the same two processes. See README.md.

    OMP_NUM_THREADS=1 python benchmarks/trace/run.py [--rounds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vpipe import Execution, Layer, Model, Pipeline
from vpipe.app.train.trace_writer import TraceWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "throughput"))

from batches import batches
from machine import description
from model import gpt

RANKS, TIMEOUT_S = 2, 120
NAMES = ("plain", "plain again", "recorded")
"""The second is as the first: what the two differ by is what this machine cannot tell apart."""

FORK = multiprocessing.get_context("fork")


class Dense(nn.Module):
    """h [B,W] -> h [B,W]: next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h))


class Square(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.square().mean()


def tiny() -> Model:
    """Two layers and a loss."""
    return Model([Layer("first", Dense, ("x",), ("h",)), Layer("second", Dense),
                  Layer("loss", Square, outputs=("loss",))], batch=("x",))


def tiny_batches() -> Iterator[dict[str, Tensor]]:
    batch = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(0))}
    while True:
        yield batch


@dataclass(frozen=True)
class Case:
    """A pipeline to record: a model in two stages, its batches, its schedule, and updates per turn."""

    name: str
    model: Callable[[], Model]
    partition: tuple[int, ...]
    batches: Callable[[], Iterator[dict[str, Tensor]]]
    schedule: str
    updates: int
    samples: int

    def start(self, folder: Path | None) -> Iterator[None]:
        """Make updates, one per ``next``; recorded where there is a folder."""
        pipe = Pipeline(self.model(), lambda own: torch.optim.AdamW(own, lr=3e-4, fused=True), stages=self.partition,
                        schedule=self.schedule, microbatches=8, execution=Execution(device="cpu"))
        with nullcontext() if folder is None else TraceWriter(folder, pipe, self.samples, limit=10**9) as trace:
            for step in pipe.train(self.batches()):
                if trace is not None:
                    trace.step(step.index + 1)
                yield


CASES = [Case("GPT, 1f1b", gpt, (10, 8), batches, "1f1b", 1, 16),
         Case("GPT, pipedream", gpt, (10, 8), batches, "pipedream", 8, 2),
         Case("tiny, 1f1b", tiny, (1, 2), tiny_batches, "1f1b", 40, 8),
         Case("tiny, pipedream", tiny, (1, 2), tiny_batches, "pipedream", 200, 1)]

Turn = tuple[float, float, float]
"""When a rank began and ended it, on the clock that the processes share; its processor seconds."""


def measure(case: Case, rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """By system and round: seconds of a turn on both ranks, processor seconds of both.

    Raises:
        SystemExit: a rank failed.
    """
    barrier = FORK.Barrier(RANKS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [FORK.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [FORK.Process(target=_work, args=(case, rounds, folder, rank, port, barrier, writer))
                 for rank, (_, writer) in enumerate(pipes)]
    try:
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        found: list[dict[str, list[Turn]]] = [reader.recv() for reader, _ in pipes]
    except EOFError:
        raise SystemExit("a rank failed: see above") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {name: [(max(end for _, end, _ in turn) - min(start for start, _, _ in turn), sum(cpu for *_, cpu in turn))
                   for turn in zip(*(rank[name] for rank in found), strict=True)] for name in NAMES}


def _work(case: Case, rounds: int, folder: Path, rank: int, port: int, barrier: Barrier, out: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS,
                            timeout=timedelta(seconds=TIMEOUT_S))
    running = {name: case.start(folder if name == "recorded" else None) for name in NAMES}
    turns: dict[str, list[Turn]] = {name: [] for name in NAMES}
    for number in range(rounds + 1):
        for name in NAMES[number % 3:] + NAMES[:number % 3]:
            barrier.wait(TIMEOUT_S)
            before, cpu = perf_counter(), process_time()
            for _ in range(case.updates):
                next(running[name])
            turns[name].append((before, perf_counter(), process_time() - cpu))
        if rank == 0 and sys.stderr.isatty():
            print(f"\r{case.name}: round {number} of {rounds}", end="", file=sys.stderr, flush=True)
    out.send({name: own[1:] for name, own in turns.items()})
    barrier.wait(TIMEOUT_S)
    os._exit(0)  # the pipelines would go on: leaving them is the one way to stop them that costs nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="turns of every system, after one to warm up")
    rounds = parser.parse_args().rounds
    print(f"{description()}; {rounds} rounds\n")
    print("| pipeline | system | ms per update | min | processor ms | time over plain: median | processor over plain |"
          "\n|---|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(case, rounds, Path(folder))
        plain = figures["plain"]
        for name, turns in figures.items():
            seconds, cpu = (1e3 * median(turn[i] for turn in turns) / case.updates for i in range(2))
            least = 1e3 * min(turn[0] for turn in turns) / case.updates
            ratios = [median(one[i] / base[i] for one, base in zip(turns, plain, strict=True)) for i in range(2)]
            print(f"| {case.name} | {name} | {seconds:.3f} | {least:.3f} | {cpu:.3f} | {ratios[0]:.3f} | "
                  f"{ratios[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
