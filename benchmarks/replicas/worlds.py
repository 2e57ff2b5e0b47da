"""Every system in processes of its own, one per rank; all are there all the time and take turns."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from time import perf_counter

import torch
import torch.distributed as dist
from setup import Setup

TIMEOUT_S = 120

FORK = multiprocessing.get_context("fork")


def measure(systems: Sequence[Setup], turns: int) -> dict[Setup, list[float]]:
    """Seconds of every turn, from the first start of a rank to the last end, after one turn to warm up.

    Raises:
        SystemExit: a rank failed.
    """
    barrier = FORK.Barrier(sum(sum(system.widths) for system in systems))
    readers: dict[Setup, list[Connection]] = {}
    processes = []
    try:
        for system in systems:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            readers[system] = []
            for rank in range(sum(system.widths)):
                reader, writer = FORK.Pipe(duplex=False)
                processes.append(FORK.Process(target=_work, args=(systems, system, rank, port, turns, barrier,
                                                                  writer)))
                processes[-1].start()
                writer.close()
                readers[system].append(reader)
        spans = {system: [_received(reader) for reader in ranks] for system, ranks in readers.items()}
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {system: [max(end for _, end in turn) - min(start for start, _ in turn)
                      for turn in zip(*ranks, strict=True)] for system, ranks in spans.items()}


def _received(reader: Connection) -> list[tuple[float, float]]:
    try:
        spans: list[tuple[float, float]] = reader.recv()
    except EOFError:
        raise SystemExit("a rank failed: see above") from None
    return spans


def _work(systems: Sequence[Setup], system: Setup, rank: int, port: int, turns: int, barrier: Barrier,
          out: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=sum(system.widths), timeout=timedelta(seconds=TIMEOUT_S))
    turn, spans = system.turn(), []
    for _ in range(turns + 1):
        for one in systems:
            barrier.wait(TIMEOUT_S)
            if one == system:
                before = perf_counter()
                turn()
                spans.append((before, perf_counter()))
    out.send(spans[1:])
    barrier.wait(TIMEOUT_S)
    os._exit(0)
