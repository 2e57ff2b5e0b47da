"""The ranks, one process each: all contenders live in the same processes and take turns, two batches at a time.

Other load of the machine then falls on all alike, and a pipeline without a flush stays full from turn to turn.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice, repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from time import perf_counter

import torch
import torch.distributed as dist
from sleepers import WIDTH, Optimizers, sleeping_model

from vpipe import Asynchronous, Cut, Execution, Pipeline, Transfers
from vpipe.plan.profile import Profile

TIMEOUT_S = 120
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Contender:
    """What one of them runs.

    Attributes:
        name: for tables.
        schedule: its order of actions.
        profile: of a microbatch of its size.
        partition: layers per stage.
        recomputed: numbers of the layers recomputed, per stage.
        microbatches: per batch.
        update_every: microbatches per update; None with a flush.
        batch_size: samples of a batch; in a turn every contender trains on equally many batches.
    """

    name: str
    schedule: str
    profile: Profile
    partition: tuple[int, ...]
    recomputed: tuple[tuple[int, ...], ...]
    microbatches: int
    update_every: int | None
    batch_size: int

    def batches(self, slower: float, batches: int) -> Iterator[float]:
        """Train; yields a loss per batch."""
        pipe = Pipeline(sleeping_model(self.profile, slower), Optimizers(self.profile, slower),
                        stages=Cut(self.partition, recompute=[list(layers) for layers in self.recomputed]),
                        schedule=Asynchronous(self.schedule, update_every=self.update_every),
                        microbatches=self.microbatches, transfers=Transfers(timeout_s=TIMEOUT_S),
                        execution=Execution(device="cpu"))
        updates = self.microbatches // (self.update_every or self.microbatches)
        steps = pipe.train(repeat({"input": torch.ones(self.batch_size, WIDTH)}))
        for _ in range(batches):
            yield from (step.loss for step in islice(steps, updates - 1, updates))


def measure(field: Sequence[Contender], slower: float, batches: int) -> dict[str, list[float]]:
    """Let the contenders take turns; by name, samples per second of the emulated devices, one figure per turn.

    Raises:
        SystemExit: a rank failed.
    """
    ranks = len(field[0].partition)
    barrier = FORK.Barrier(ranks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reader, writer = FORK.Pipe(duplex=False)
    processes = [FORK.Process(target=_work, args=(field, slower, batches, rank, ranks, port, barrier, writer))
                 for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        writer.close()
        return _collect(reader, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(reader: Connection, processes: list[multiprocessing.context.ForkProcess]) -> dict[str, list[float]]:
    while True:
        ready = wait([reader, *(process.sentinel for process in processes)])
        if reader in ready:
            found: dict[str, list[float]] = reader.recv()
            return found
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed: see above")


def _work(field: Sequence[Contender], slower: float, batches: int, rank: int, ranks: int, port: int, barrier: Barrier,
          out: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=TIMEOUT_S))
    trainings = {contender.name: contender.batches(slower, batches) for contender in field}
    samples = {contender.name: contender.batch_size for contender in field}
    found: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(batches // 2):
        for name, losses in trainings.items():
            barrier.wait(TIMEOUT_S)
            next(losses)  # finds the caches full of the others' data, and does not count
            started = perf_counter()
            next(losses)
            if 0 < turn < batches // 2 - 1:  # the first warms up, in the last a pipeline drains
                found[name].append(slower * samples[name] / (perf_counter() - started))
        if rank == 0:
            print(f"  {2 + 2 * turn} of {batches} batches", flush=True)
    if rank == 0:
        out.send(found)
    barrier.wait(TIMEOUT_S)
    os._exit(0)  # the streams would go on: leaving them is the one way to stop them that costs nothing
