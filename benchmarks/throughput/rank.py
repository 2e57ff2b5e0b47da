"""One of the two ranks: all entrants live in the same two processes and take turns."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from entrant import Entrant, Updates
from machine import busy_s

from vpipe.errors import VpipeError

TIMEOUT_S = 120
HEAD, TAIL = 1, 1
"""Updates of a turn before and after those that count: a pipeline that stays full must be full at both ends."""


@dataclass
class Result:
    """What one entrant did.

    Attributes:
        seconds: per update, one entry per turn: the time of the turn's updates, as rank 0 sees them end, over
            their number.
        cpu_seconds: processor time of this rank per update, the transport's threads included, one entry per turn.
        busy_seconds: processor time of the whole machine in that time, likewise.
        losses: of all updates, where this rank knows them.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    busy_seconds: list[float]
    losses: list[float]


def turn(entrant: Entrant, updates: Updates | None, result: Result, steps: int) -> None:
    """Let an entrant make its updates; the rank that has no part in it waits at the next barrier."""
    dist.barrier()
    if updates is None:
        return
    torch.set_num_threads(entrant.threads)
    losses = [next(updates) for _ in range(HEAD)]
    before = (perf_counter(), process_time(), busy_s())
    losses += [next(updates) for _ in range(steps)]
    after = (perf_counter(), process_time(), busy_s())
    kept = (result.seconds, result.cpu_seconds, result.busy_seconds)
    for values, start, end in zip(kept, before, after, strict=True):
        values.append((end - start) / steps)
    losses += [next(updates) for _ in range(TAIL)]
    torch.set_num_threads(1)
    result.losses += [loss for loss in losses if loss is not None]


def work(entrants: list[Entrant], rounds: int, steps: int, out: Path) -> None:
    """Round 0 warms up; then ``rounds`` times every entrant in turn. Writes the results of this rank as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, parent = dist.get_rank(), os.getppid()
    results = {entrant.name: Result([], [], [], []) for entrant in entrants}
    running = {entrant.name: entrant.start() if rank in entrant.ranks else None for entrant in entrants}
    started = perf_counter()
    for number in range(rounds + 1):
        for entrant in entrants:
            if os.getppid() != parent:
                raise SystemExit(f"rank {rank}: the program that started it is gone")
            try:
                turn(entrant, running[entrant.name], results[entrant.name], steps)
            except VpipeError as error:
                raise SystemExit(f"rank {rank}, {entrant.name}: {error}") from error
        if number == 0:
            for result in results.values():
                for values in (result.seconds, result.cpu_seconds, result.busy_seconds):
                    values.clear()
        if rank == 0:
            print(f"  round {number} of {rounds}, {perf_counter() - started:.0f} s", flush=True)
    dist.barrier()
    out.write_text(json.dumps({
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "results": {name: asdict(result) for name, result in results.items()}}))
    # The streams still hold microbatches: leaving now is the one way to stop them that costs nothing.
    os._exit(0)
