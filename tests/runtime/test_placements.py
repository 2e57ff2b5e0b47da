"""A user's schedule places its stages as freely as vpipe's own: it computes what its oracle says, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import placement_jobs
import pytest
from models import rich_batches, rich_model, untied_model
from oracles import DECAY_AND_CLIP, AdamW, equals_its_oracle
from placement_jobs import in_turn, registered, wide_ends
from test_replicas import cut
from test_replicas_gloo import without_rates
from world import World

from vpipe import Pipeline
from vpipe.errors import UserError
from vpipe.schedules.registry import register_schedule


@pytest.fixture(autouse=True)
def schedules() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [
    ("carousel", 3, 9), ("carousel", 4, 8), ("carousel", 2, 6), ("wide_ends", 4, 8), ("wide_ends", 3, 9)])
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
        partition=cut(8, ranks), update_every=every, **DECAY_AND_CLIP,
        version_of=lambda microbatch, stage, widths, update_every: microbatch // (2 * update_every))
    assert list(map(len, pipe.placement)) == [2] * ranks


@pytest.mark.parametrize(("name", "microbatches"), [("carousel", 8), ("wide_ends", 6)])
def test_over_gloo_and_under_nccl_s_rules(world: World, name: str, microbatches: int) -> None:
    arguments = {"model": "rich", "schedule": name, "microbatches": microbatches, "samples": 12 if microbatches == 6
                 else 16, "batches": 2, "partition": [2, 2, 2, 2], "recompute": 0.5, "grad_clip": 0.5,
                 "evaluate_after": [0], "lengths": [6, 9]}
    expected = without_rates(placement_jobs.jobs.train_here(**arguments))
    for result in world.run(placement_jobs.train, **arguments):
        assert without_rates(result) == expected
    for result in world.run(placement_jobs.under_rules, run="jobs.train", eager=False, buffered=False, **arguments):
        assert without_rates(result) == expected


@pytest.mark.parametrize(("layout", "stages", "what", "hint"), [
    (lambda ranks, chunks: ((0,),) * ranks, 2, "the layout of 'odd' places 2 stages on 2 ranks as [[0], [0]]",
     "return the ranks of every stage, numbered from 0"),
    (lambda ranks, chunks: ((0,), (1,), (2,)), 2, "the layout of 'odd' places 2 stages on 2 ranks as [[0], [1], [2]]",
     "leave out no rank"),
    (lambda ranks, chunks: ((0, 0), (1,)), 2, "rank 0 stands twice among the ranks [0, 0] of a stage", "name each")])
def test_wrong_placements_are_refused(layout: object, stages: int, what: str, hint: str,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.schedules.registry._REGISTERED", {})
    register_schedule("odd", flush=True, layout=layout)(placement_jobs.carousel)  # type: ignore[arg-type]
    with pytest.raises(UserError) as raised:
        Pipeline(rich_model(), AdamW(), stages=stages, schedule="odd", microbatches=4)
    assert what in str(raised.value)
    assert hint in str(raised.value)
