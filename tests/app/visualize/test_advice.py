"""The warnings of a pipeline that never fills and of late gradients, and what is said of these."""

from __future__ import annotations

import pytest

from vpipe.app.visualize.advice import Advice
from vpipe.schedules.assignment import Layout, Placement
from vpipe.schedules.builder import build
from vpipe.schedules.delays import greatest_delay
from vpipe.schedules.schedule import Schedule


def made(name: str, ranks: int, microbatches: int, placement: Placement | None = None) -> Schedule:
    return build(name, placement or ranks, microbatches)


def few_microbatches(schedule: Schedule, batch: int) -> str | None:
    said = Advice(schedule, schedule.microbatches, batch).few_microbatches
    return said and said.replace("training.num_microbatches", "m")


@pytest.mark.parametrize(("name", "ranks", "microbatches", "batch", "said"), [
    ("gpipe", 4, 1, 64, "1 microbatch for 4 stages leaves ranks without work; raise m, at best to 32"),
    ("1f1b", 4, 3, 6, "3 microbatches for 4 stages leave ranks without work; raise m, at best to 6"),
    ("1f1b", 4, 1, 1, "1 microbatch for 4 stages leaves ranks without work; raise dataset.batch_size, which is 1, "
                      "and m"),
    ("zb_v", 4, 2, 24, "2 microbatches for 8 stages leave ranks without work; raise m, at best to 6"),
])
def test_fewer_microbatches_than_ranks(name: str, ranks: int, microbatches: int, batch: int, said: str) -> None:
    assert few_microbatches(made(name, ranks, microbatches), batch) == said


def test_replicas_share_the_microbatches() -> None:
    placement = ((0, 1), (2, 3))
    assert few_microbatches(made("1f1b", 2, 2, placement), 24) == (
        "2 microbatches for 2 stages with 2 replicas leave ranks without work; raise m, at best to 12")
    assert few_microbatches(made("1f1b", 2, 4, placement), 24) is None


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [
    ("1f1b", 4, 4), ("gpipe", 1, 1), ("interleaved", 4, 4), ("pipedream", 4, 1)])
def test_nothing_is_said_of_others(name: str, ranks: int, microbatches: int) -> None:
    assert few_microbatches(made(name, ranks, microbatches), 24) is None


def test_few_slices_are_advised_against_as_few_microbatches_are() -> None:
    few, enough = (few_microbatches(build("seq1f1b", 4, 1, slices=slices), 24) for slices in (2, 4))
    assert few == "1 microbatch in 2 slices for 4 stages leaves ranks without work; raise m, at best to 12"
    assert enough is None


@pytest.mark.parametrize(("name", "placement", "every", "batch", "line", "fewer"), [
    ("pipedream", 2, 1, 16, "by stage: mean 1 0, greatest 1 0",
     "training.num_microbatches 2 and parallel.update_every 2 (0.5 updates late; an update is then 16 samples)"),
    ("pipedream", 4, 1, 22, "by stage: mean 3 2 1 0, greatest 3 2 1 0", None),  # 4 to 8 do not divide 22
    ("pipedream", 4, 4, 16, "by stage: mean 0.75 0.5 0.25 0, greatest 1 1 1 0", None),
    ("pipedream_vertical_sync", 3, 1, 9, "by stage: mean 2 2 2, greatest 2 2 2",
     "training.num_microbatches 3 and parallel.update_every 3 (0.667 updates late; an update is then 9 samples)"),
    ("2bw", 3, 3, 9, "by stage: mean 1 1 1, greatest 1 1 1", None),
    ("pipedream", 20, 4, 20, "mean 4.75 at stage 0 to 0 at stage 19, greatest 5",
     "training.num_microbatches 20 and parallel.update_every 20 (0.95 updates late; an update is then 20 samples)"),
    ("1f1b", 4, None, 8, None, None)])
def test_delays_are_described_with_what_would_lower_them(name: str, placement: int, every: int | None,
                                                         batch: int, line: str | None, fewer: str | None) -> None:
    schedule = build(name, Layout.LOOP(placement), every or 8, every)
    advice = Advice(schedule, every or 8, batch)
    said = advice.delays
    assert (said and said.removeprefix("delay of gradients in updates").lstrip(":, ")) == line
    assert advice.fewer_updates == fewer
    assert (advice.late_gradients() is None) == (line is None or greatest_delay(schedule, 0) <= 2)


def test_a_warning_names_deeper_warm_ups() -> None:
    deep, own = (build("pipedream", ((0,), (1,), (2,), (3,)), 4, 1, warmup=depths) for depths in ((9, 2, 1, 0), None))
    assert "; another optimizer; a lower warmup_depth; fewer stages" in str(
        Advice(deep, 4, 20).late_gradients("another optimizer"))
    assert "warmup_depth" not in str(Advice(own, 4, 20).late_gradients())


def test_fewer_updates_with_replicas() -> None:
    schedule = build("pipedream", ((0, 1), (2, 3), (4, 5)), 12, 1)
    assert [Advice(schedule, microbatches, 24).fewer_updates for microbatches in (12, 1)] == [
        "parallel.update_every 3 (0.667 updates late; an update is then 12 samples)",
        "training.num_microbatches 6 and parallel.update_every 3 (0.667 updates late; an update is then 24 samples)"]
