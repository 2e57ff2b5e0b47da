"""Schedules of a user, whose stages are where no schedule of vpipe puts them; and jobs that train with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jobs
import nccl_jobs

from vpipe.schedules import registry
from vpipe.schedules.action import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule
from vpipe.schedules.size import Placement, both_ways


def in_turn(ranks: int, chunks: int) -> Placement:
    """Every stage on every rank: microbatch m takes stage s on rank (s + m) mod p."""
    return tuple(tuple((stage + number) % ranks for number in range(ranks)) for stage in range(ranks))


def carousel(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """p microbatches at once, each one rank behind the one before; all forwards, then all backwards."""
    turns = sorted((microbatch // ranks, (rank - microbatch) % ranks, microbatch) for microbatch in range(microbatches))
    for _, stage, microbatch in turns:
        yield forward(stage, microbatch)
    for _, stage, microbatch in sorted(turns, key=lambda turn: (turn[0], -turn[1])):
        yield backward(stage, microbatch)
    for stage in range(ranks):
        yield step(stage, 0)


def wide_ends(ranks: int, chunks: int) -> Placement:
    """The first and the last stage on all ranks but those of the others, which have one each."""
    ends = (0, ranks - 1)
    return (ends, *((rank,) for rank in range(1, ranks - 1)), ends)


def ended(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    last = ranks - 1
    if 0 < rank < last:
        for microbatch in range(microbatches):
            yield forward(rank, microbatch)
        for microbatch in range(microbatches):
            yield backward(rank, microbatch)
        yield step(rank, 0)
        return
    own = range(0 if rank == 0 else 1, microbatches, 2)
    for stage in (0, last):
        yield from (forward(stage, microbatch) for microbatch in own)
    for stage in (last, 0):
        yield from (backward(stage, microbatch) for microbatch in own)
    yield step(0, 0)
    yield step(last, 0)


def opposite(rank: int, ranks: int, microbatches: int, update_every: int = 1) -> Iterator[Action]:
    """Both ways without a flush: an update takes ``update_every`` microbatches that come down, and as many that go up.

    All of an update's microbatches go forward, then backward.
    """
    first = 0
    while first < microbatches:
        own = [(rank if microbatch % 2 == 0 else ranks - 1 - rank, microbatch)
               for microbatch in range(first, min(first + 2 * update_every, microbatches))]
        for stage, microbatch in sorted(own, key=lambda turn: (turn[0], turn[1])):
            yield forward(stage, microbatch)
        for stage, microbatch in sorted(own, key=lambda turn: (-turn[0], turn[1])):
            yield backward(stage, microbatch)
        for stage in sorted({rank, ranks - 1 - rank}):
            yield step(stage, first // (2 * update_every))
        first += 2 * update_every


@contextmanager
def registered() -> Iterator[None]:
    """Know the schedules for a while: other tests list the schedules that there are."""
    register_schedule("carousel", flush=True, layout=in_turn)(carousel)
    register_schedule("wide_ends", flush=True, layout=wide_ends,
                      peak_activations=lambda rank, size: size.microbatches + size.microbatches % 2)(ended)
    register_schedule("opposite", flush=False, layout=both_ways,
                      peak_activations=lambda rank, size: 2 * size.update_every)(opposite)
    try:
        yield
    finally:
        for name in ("carousel", "wide_ends", "opposite"):
            del registry._REGISTERED[name]


def train(**arguments: Any) -> dict[str, Any]:
    with registered():
        return jobs.train(**arguments)


def under_rules(**arguments: Any) -> Any:
    with registered():
        return nccl_jobs.under(**arguments)
