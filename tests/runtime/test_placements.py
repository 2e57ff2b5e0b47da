"""A user's schedule places its stages as freely as vpipe's own: it computes what its oracle says, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jobs
import pytest
from everywhere import OVER, same_everywhere
from models import cut, rich_batches, rich_model, untied_model
from oracles import DECAY_AND_CLIP, AdamW, equals_its_oracle
from world import World

from vpipe import Pipeline
from vpipe.errors import UserError
from vpipe.schedules import registry
from vpipe.schedules.assignment import Placement, both_ways
from vpipe.schedules.kinds import Action, backward, forward, step
from vpipe.schedules.registry import register_schedule


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
                      peak_activations=lambda rank, size: 2 * size.update_every,
                      version_of=lambda number, stage, widths, update_every: number // (2 * update_every))(opposite)
    try:
        yield
    finally:
        for name in ("carousel", "wide_ends", "opposite"):
            del registry._REGISTERED[name]


def train(**arguments: Any) -> dict[str, Any]:
    with registered():
        return jobs.train(**arguments)


@pytest.fixture(autouse=True)
def schedules() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize(("name", "ranks", "microbatches", "replicas", "tied"), [
    ("carousel", 3, 9, 1, True), ("carousel", 4, 8, 1, False), ("carousel", 2, 6, 2, True), ("carousel", 4, 8, 2, True),
    ("wide_ends", 4, 8, 1, True), ("wide_ends", 3, 9, 1, False), ("wide_ends", 3, 9, 2, True)])
def test_with_a_flush(name: str, ranks: int, microbatches: int, replicas: int, tied: bool) -> None:
    layout = in_turn if name == "carousel" else wide_ends
    microbatches *= replicas
    pipe, _ = equals_its_oracle(
        rich_model if tied else untied_model, rich_batches(2, microbatches), schedule=name, microbatches=microbatches,
        partition=cut(8, ranks), replicas=replicas, recompute=0.5, **DECAY_AND_CLIP)
    assert list(map(len, pipe.placement)) == [replicas * len(own) for own in layout(ranks, 1)]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_without_a_flush(ranks: int, every: int) -> None:
    """An update of a stage takes microbatches of both its copies; the last update of the stream is incomplete."""
    pipe, _ = equals_its_oracle(
        rich_model, rich_batches(5, 2 * every + 2), schedule="opposite", microbatches=2 * every + 2,
        partition=cut(8, ranks), update_every=every, **DECAY_AND_CLIP)
    assert list(map(len, pipe.placement)) == [2] * ranks


@pytest.mark.parametrize(("name", "microbatches"), [("carousel", 8), ("wide_ends", 6)])
def test_over_gloo_and_under_nccl_s_rules(world: World, name: str, microbatches: int) -> None:
    arguments = {"model": "rich", "schedule": name, "microbatches": microbatches, "samples": 12 if microbatches == 6
                 else 16, "batches": 2, "partition": [2, 2, 2, 2], "recompute": 0.5, "grad_clip": 0.5,
                 "evaluate_after": [0], "lengths": [6, 9]}
    for rules in OVER.values():
        same_everywhere(world, rules, job=train, **arguments)


@pytest.mark.parametrize(("layout", "stages", "what", "hint"), [
    (lambda ranks, chunks: ((0,),) * ranks, 2, "the layout of 'odd' places 2 stages on 2 ranks as [[0], [0]]",
     "return the ranks of every stage, numbered from 0"),
    (lambda ranks, chunks: ((0,), (1,), (2,)), 2, "the layout of 'odd' places 2 stages on 2 ranks as [[0], [1], [2]]",
     "leave out no rank"),
    (lambda ranks, chunks: ((0, 0), (1,)), 2, "rank 0 stands twice among the ranks [0, 0] of a stage", "name each")])
def test_wrong_placements_are_refused(layout: object, stages: int, what: str, hint: str,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.schedules.registry._REGISTERED", {})
    register_schedule("odd", flush=True, layout=layout)(carousel)  # type: ignore[arg-type]
    with pytest.raises(UserError) as raised:
        Pipeline(rich_model(), AdamW(), stages=stages, schedule="odd", microbatches=4)
    assert what in str(raised.value)
    assert hint in str(raised.value)
