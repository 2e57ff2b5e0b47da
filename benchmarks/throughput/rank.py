"""One of the two ranks of a world: its systems live in the same two processes and take turns."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from machine import busy_s
from processes import KEEPS, OUT, SAYS
from system import System, Updates

from vpipe.app.launch.rank_env import keep_memory
from vpipe.errors import VpipeError

TIMEOUT_S = 1800
"""Of the ranks' transfers: a world waits while the other has its turn."""

HEAD, TAIL = 1, 1
"""Updates of a turn before and after those that count: a pipeline that stays full must be full at both ends."""


@dataclass
class Result:
    """What one system did.

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


def turn(system: System, updates: Updates | None, result: Result, steps: int) -> None:
    """Let a system make its updates; the rank that has no part in it waits for the next order."""
    dist.barrier()
    if updates is None:
        return
    torch.set_num_threads(system.threads)
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


def work(systems: list[System], steps: int) -> None:
    """Do what the lines of standard input say, until they end: a turn of a system; forget what was measured so far,
    which was to warm up; write the results of this rank as JSON."""
    if os.environ[KEEPS] == "1":
        print(f"  vpipe: {keep_memory()}", flush=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, says = dist.get_rank(), int(os.environ[SAYS])
    named = {system.name: system for system in systems}
    results = {name: Result([], [], [], []) for name in named}
    running = {name: system.start() if rank in system.ranks else None for name, system in named.items()}
    for line in sys.stdin:
        order = json.loads(line)
        if "turn" in order:
            name = order["turn"]
            try:
                turn(named[name], running[name], results[name], steps)
            except VpipeError as error:
                print(f"rank {rank}, {name}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        elif "forget" in order:
            for result in results.values():
                for values in (result.seconds, result.cpu_seconds, result.busy_seconds):
                    values.clear()
        else:
            dist.barrier()
            Path(os.environ[OUT]).write_text(json.dumps(
                {"results": {name: asdict(result) for name, result in results.items()}}))
        os.write(says, b".")
    # The streams still hold microbatches: leaving now is the one way to stop them that costs nothing.
    os._exit(0)
