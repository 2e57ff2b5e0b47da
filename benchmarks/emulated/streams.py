"""Asynchronous schedules: the period of an update in the steady state, which no fill and no drain enters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise, repeat
from multiprocessing.synchronize import Barrier
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any

import torch
from bare_systems import Boxes
from case import LONG, SHORT, Case
from device import WIDTH, Times, pause
from ranks import FORK, TIMEOUT_S, run_ranks
from vpipe_systems import emulated_model

from vpipe import Asynchronous, Execution, Pipeline
from vpipe.errors import PerformanceWarning
from vpipe.schedules.assignment import Layout

UPDATES, WINDOWS = 40, 3


@dataclass(frozen=True)
class Stream:
    """A stream of microbatches under pipedream.

    Attributes:
        ranks: devices.
        update_every: microbatches per update.
        times: of a microbatch on a device.
        extra: microbatches in flight between two neighbours beyond the one that pipedream has there.
    """

    ranks: int
    update_every: int
    times: Times
    extra: int

    def __str__(self) -> str:
        return (f"async P = {self.ranks}, k = {self.update_every}, {self.times}, "
                f"warm-up {'-'.join(map(str, self.depths))}")

    @property
    def depths(self) -> list[int]:
        """Per rank the forwards before its first backward."""
        return [(1 + self.extra) * (self.ranks - 1 - rank) for rank in range(self.ranks)]

    @property
    def ideal_s(self) -> float:
        """Seconds of an update without a bubble, if messages and programs took no time."""
        return self.update_every * float(self.times.forward_s + self.times.backward_s)


STREAMS = tuple(Stream(ranks, k, times, extra) for ranks in (4, 8) for times in (LONG, SHORT)
                for k in (1, ranks) for extra in (0, 1) if times == SHORT or extra == 1 or (k, extra) == (1, 0))
PEERS = tuple(Case(ranks, m, LONG, 3) for ranks in (4, 8) for m in (ranks // 2, ranks, 2 * ranks))
"""What torch.distributed.pipelining is given: as many microbatches per update."""


@dataclass(frozen=True)
class StreamRow:
    """A stream's figures; ``system`` is ``vpipe`` or ``bare``."""

    stream: str
    system: str
    ranks: int
    update_every: int
    times: str
    ideal_s: float
    seconds: Sequence[float]
    cpu_s: Sequence[float]

    @property
    def over_ideal(self) -> float:
        """How much more than the ideal, as a share."""
        return median(self.seconds) / self.ideal_s - 1


def measure_stream(stream: Stream, system: str) -> StreamRow:
    """Let a stream flow in processes of its own; measure it when the pipeline is full."""
    if system == "bare":
        depth = max(stream.depths) + 2
        work: Any = partial(_bare, stream, *(Boxes(FORK, Layout.LOOP(stream.ranks), depth) for _ in range(2)))
    else:
        work = partial(_vpipe, stream)
    ranks = run_ranks(stream.ranks, partial(_windows, stream, work))
    return StreamRow(str(stream), system, stream.ranks, stream.update_every, str(stream.times), stream.ideal_s,
                     [mean(column) for column in zip(*(seconds for seconds, _ in ranks), strict=True)],
                     [sum(column) for column in zip(*(cpu for _, cpu in ranks), strict=True)])


def _windows(stream: Stream, work: Any, rank: int, barrier: Barrier) -> tuple[list[float], list[float]]:
    """Return, of one rank, the period of an update in each window, and its processor seconds."""
    settling = -(-3 * stream.ranks // stream.update_every) + 2  # updates before the first window, and after the last
    updates = work(rank)
    barrier.wait(TIMEOUT_S)
    for _ in range(settling):
        next(updates)
    stamps = [(perf_counter(), process_time())]
    for _ in range(WINDOWS):
        for _ in range(UPDATES):
            next(updates)
        stamps.append((perf_counter(), process_time()))
    for _ in range(settling):  # for the ranks that have not come so far
        next(updates)
    return tuple([(after[i] - before[i]) / UPDATES for before, after in pairwise(stamps)]
                 for i in (0, 1))  # type: ignore[return-value]


def _vpipe(stream: Stream, rank: int) -> Iterator[object]:
    model = emulated_model(stream.ranks, stream.times)
    warnings.simplefilter("ignore", PerformanceWarning)  # of late gradients
    pipe = Pipeline(model, lambda parameters: torch.optim.SGD(parameters, lr=0.0), stages=stream.ranks,
                    schedule=Asynchronous("pipedream", update_every=stream.update_every, warmup_depth=stream.depths),
                    microbatches=stream.ranks, execution=Execution(device="cpu"))
    return pipe.train(repeat({"input": torch.ones(stream.ranks, WIDTH)}))


def _bare(stream: Stream, forth: Boxes, back: Boxes, rank: int) -> Iterator[None]:
    """The same order of forwards and backwards, with messages in shared memory and no framework."""
    last, depth = stream.ranks - 1, stream.depths[rank]
    forward_s, backward_s, places = float(stream.times.forward_s), float(stream.times.backward_s), forth.places
    message = torch.zeros(1, WIDTH)
    for microbatch in count():
        if rank > 0:
            message = forth.take(rank, microbatch % places)
        pause(forward_s)
        if rank < last:
            forth.put(rank + 1, microbatch % places, message)
        if (returned := microbatch - depth) < 0:
            continue
        if rank < last:
            message = back.take(rank, returned % places)
        pause(backward_s)
        if rank > 0:
            back.put(rank - 1, returned % places, message)
        if (returned + 1) % stream.update_every == 0:
            yield
