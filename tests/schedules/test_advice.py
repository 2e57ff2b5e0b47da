"""The warning of a pipeline that never fills."""

from __future__ import annotations

import pytest

from vpipe.schedules.advice import Advice
from vpipe.schedules.builder import build
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import Placement


def made(name: str, ranks: int, microbatches: int, placement: Placement | None = None) -> Schedule:
    return build(name, placement or ranks, microbatches)


def few_microbatches(schedule: Schedule, batch: int | None = None) -> str | None:
    return Advice(schedule, schedule.microbatches, batch, ("m", "k")).few_microbatches


@pytest.mark.parametrize(("name", "ranks", "microbatches", "batch", "said"), [
    ("gpipe", 4, 1, 64, "1 microbatch for 4 stages leaves a bubble of 75 % with gpipe, where all stages take equally "
                        "long; m 16 would leave 16 %"),  # (p - 1) / (m + p - 1)
    ("1f1b", 4, 3, 6, "3 microbatches for 4 stages leave a bubble of 50 % with 1f1b, where all stages take equally "
                      "long; m 6 would leave 33 %"),
    ("1f1b", 4, 1, 1, "1 microbatch for 4 stages leaves a bubble of 75 % with 1f1b, where all stages take equally "
                      "long; raise dataset.batch_size, which is 1, and m"),
    ("zb_v", 4, 2, None, "2 microbatches for 8 stages leave a bubble of 45 % with zb_v, where all stages take equally "
                         "long; m 16 would leave 0 %"),
    ("1f1b", 300, 1, 350, "1 microbatch for 300 stages leaves a bubble of 100 % with 1f1b, where all stages take "
                          "equally long; raise m, at best to 350"),
    ("1f1b", 200, 199, None, "199 microbatches for 200 stages leave ranks without work; raise m, at best to 800"),
])
def test_fewer_microbatches_than_ranks(name: str, ranks: int, microbatches: int, batch: int | None, said: str) -> None:
    assert few_microbatches(made(name, ranks, microbatches), batch) == said


def test_replicas_share_the_microbatches() -> None:
    placement = ((0, 1), (2, 3))
    assert few_microbatches(made("1f1b", 2, 2, placement)) == (
        "2 microbatches for 2 stages with 2 replicas leave a bubble of 50 % with 1f1b, where all stages take equally "
        "long; m 16 would leave 11 %")
    assert few_microbatches(made("1f1b", 2, 4, placement)) is None


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [
    ("1f1b", 4, 4), ("gpipe", 1, 1), ("interleaved", 4, 4), ("pipedream", 4, 1)])
def test_nothing_is_said_of_others(name: str, ranks: int, microbatches: int) -> None:
    assert few_microbatches(made(name, ranks, microbatches)) is None
