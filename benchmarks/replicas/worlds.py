"""Every entrant in processes of its own, one per rank; all are there all the time and take turns."""

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


def measure(entrants: Sequence[Setup], turns: int) -> dict[Setup, list[float]]:
    """Seconds of every turn, from the first start of a rank to the last end, after one turn to warm up.

    Raises:
        SystemExit: a rank failed.
    """
    barrier = FORK.Barrier(sum(sum(entrant.widths) for entrant in entrants))
    readers: dict[Setup, list[Connection]] = {}
    processes = []
    try:
        for entrant in entrants:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            readers[entrant] = []
            for rank in range(sum(entrant.widths)):
                reader, writer = FORK.Pipe(duplex=False)
                processes.append(FORK.Process(target=_work, args=(entrants, entrant, rank, port, turns, barrier,
                                                                  writer)))
                processes[-1].start()
                writer.close()
                readers[entrant].append(reader)
        spans = {entrant: [_received(reader) for reader in ranks] for entrant, ranks in readers.items()}
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {entrant: [max(end for _, end in turn) - min(start for start, _ in turn)
                      for turn in zip(*ranks, strict=True)] for entrant, ranks in spans.items()}


def _received(reader: Connection) -> list[tuple[float, float]]:
    try:
        spans: list[tuple[float, float]] = reader.recv()
    except EOFError:
        raise SystemExit("a rank failed: see above") from None
    return spans


def _work(entrants: Sequence[Setup], entrant: Setup, rank: int, port: int, turns: int, barrier: Barrier,
          out: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=sum(entrant.widths), timeout=timedelta(seconds=TIMEOUT_S))
    turn, spans = entrant.turn(), []
    for _ in range(turns + 1):
        for one in entrants:
            barrier.wait(TIMEOUT_S)
            if one == entrant:
                before = perf_counter()
                turn()
                spans.append((before, perf_counter()))
    out.send(spans[1:])
    barrier.wait(TIMEOUT_S)
    os._exit(0)
