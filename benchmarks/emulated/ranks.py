"""The ranks, one process each: the systems of a case live in the same processes and take turns."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from time import perf_counter, process_time
from typing import TypeVar

import torch
import torch.distributed as dist
from case import Case
from device import exact_pauses
from system import System

TIMEOUT_S = 60
UPDATES = 2
"""Per turn: one after the other, so that what a system does between two of them counts, too."""

Span = tuple[float, float, float]
"""When a turn began and ended on one rank, on the clock that all processes of the machine share; processor seconds."""

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")


def run_ranks(ranks: int, work: Callable[[int, Barrier], T]) -> list[T]:
    """Call ``work(rank, barrier)`` in a process per rank, joined by gloo; return what each returned.

    Raises:
        SystemExit: a rank failed.
    """
    barrier = FORK.Barrier(ranks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [FORK.Pipe(duplex=False) for _ in range(ranks)]
    processes = [FORK.Process(target=_run, args=(work, rank, ranks, port, barrier, pipes[rank][1]))
                 for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        return _collect([reader for reader, _ in pipes])
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(case: Case, field: Sequence[System]) -> dict[str, list[tuple[float, float]]]:
    """Let the systems take turns; by name and turn, seconds per update and processor seconds of all ranks for one."""
    spans = run_ranks(case.ranks, partial(_take_turns, case, field))
    return {system.name: [_figures(turn) for turn in zip(*(rank[system.name] for rank in spans), strict=True)]
            for system in field}


def _collect(readers: list[Connection]) -> list[T]:
    found: dict[int, T] = {}
    while len(found) < len(readers):
        for ready in wait([reader for i, reader in enumerate(readers) if i not in found]):
            rank = readers.index(ready)
            try:
                found[rank] = readers[rank].recv()
            except EOFError:
                raise SystemExit(f"rank {rank} failed: see above") from None
    return [found[rank] for rank in range(len(readers))]


def _figures(turn: Sequence[Span]) -> tuple[float, float]:
    """From the first start to the last end, over the updates."""
    starts, ends, cpu = zip(*turn, strict=True)
    return (max(ends) - min(starts)) / UPDATES, sum(cpu) / UPDATES


def _run(work: Callable[[int, Barrier], T], rank: int, ranks: int, port: int, barrier: Barrier,
         out: Connection) -> None:
    torch.set_num_threads(1)
    exact_pauses()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=TIMEOUT_S))
    out.send(work(rank, barrier))
    barrier.wait(TIMEOUT_S)
    os._exit(0)  # the systems would go on: leaving them is the one way to stop them that costs nothing


def _take_turns(case: Case, field: Sequence[System], rank: int, barrier: Barrier) -> dict[str, list[Span]]:
    running = {system.name: system.start(case, rank) for system in field}
    spans: dict[str, list[Span]] = {system.name: [] for system in field}
    for turn in range(case.turns + 1):
        for system in field:
            updates = running[system.name]
            barrier.wait(TIMEOUT_S)
            before, cpu = perf_counter(), process_time()
            for _ in range(UPDATES if turn else 1):
                next(updates)
            if turn:
                spans[system.name].append((before, perf_counter(), process_time() - cpu))
    return spans
