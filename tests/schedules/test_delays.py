"""Hold the delays of gradients to their closed forms, and the ones read off the actions to these."""

from dataclasses import replace

import pytest

from vpipe.schedules.advice import Advice
from vpipe.schedules.builder import build
from vpipe.schedules.delays import greatest_delay, mean_delay
from vpipe.schedules.lowering import lower
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import default_placement

PLACEMENTS = [default_placement(1), default_placement(4), ((0, 1), (2, 3), (4, 5)), ((0, 1, 2), (3,)),
              ((0,), (1, 2, 3), (4, 5))]


def delays(schedule: Schedule) -> list[tuple[float, int]]:
    return [(mean_delay(schedule, stage), greatest_delay(schedule, stage)) for stage in range(schedule.stages)]


def read_off(schedule: Schedule) -> Schedule:
    """Return the same schedule without its name, so that nothing is known but its actions."""
    return replace(schedule, name="a.csv", stream=False)


@pytest.mark.parametrize("every", [1, 2, 3, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_mean_delay_is_the_warm_up_over_the_microbatches_of_an_update(
        placement: tuple[tuple[int, ...], ...], every: int) -> None:
    microbatches = 6 * every * max(4, 20 // every)  # whole steps of any of the placements, past the warm-up
    plain = build("pipedream", placement, microbatches, every)
    own = plain.warmup
    assert own == tuple((sum(map(len, placement[s:])) - 1) // len(ranks) for s, ranks in enumerate(placement))
    six_more = tuple(depth + 6 // len(ranks) for depth, ranks in zip(own[:-1], placement, strict=False)) + own[-1:]
    for warmup in (own, six_more):  # with six more microbatches in flight at all stages but the last
        schedule = build("pipedream", placement, microbatches, every, warmup=warmup)
        assert schedule.warmup == warmup
        assert delays(schedule) == [(depth / every, -(-depth // every)) for depth in warmup]
        assert delays(read_off(lower(schedule))) == delays(schedule)
        if len(set(map(len, placement))) == 1:
            synchronised = build("pipedream_vertical_sync", placement, microbatches, every, warmup=warmup)
            assert delays(synchronised) == [(warmup[0] / every, -(-warmup[0] // every))] * len(placement)
            assert delays(read_off(synchronised)) == delays(synchronised)
        if every > max(warmup):
            double = build("2bw", placement, microbatches, every, warmup=warmup)
            assert delays(double) == delays(read_off(double)) == [(1, 1)] * len(placement)


@pytest.mark.parametrize(("name", "placement", "every", "batch", "line", "fewer"), [
    ("pipedream", 2, 1, 16, "by stage: mean 1 0, greatest 1 0",
     "microbatches 2 and update_every 2 (0.5 updates late; an update is then 16 samples)"),
    ("pipedream", 4, 1, 22, "by stage: mean 3 2 1 0, greatest 3 2 1 0", None),  # 4 to 8 do not divide 22
    ("pipedream", 4, 4, 16, "by stage: mean 0.75 0.5 0.25 0, greatest 1 1 1 0", None),
    ("pipedream_vertical_sync", 3, 1, None, "by stage: mean 2 2 2, greatest 2 2 2",
     "microbatches 3 and update_every 3 (0.667 updates late)"),
    ("2bw", 3, 3, None, "by stage: mean 1 1 1, greatest 1 1 1", None),
    ("pipedream", 20, 4, None, "mean 4.75 at stage 0 to 0 at stage 19, greatest 5",
     "microbatches 20 and update_every 20 (0.95 updates late)"),
    ("1f1b", 4, None, None, None, None)])
def test_delays_are_described_with_what_would_lower_them(name: str, placement: int, every: int | None,
                                                         batch: int | None, line: str | None,
                                                         fewer: str | None) -> None:
    schedule = build(name, default_placement(placement), every or 8, every)
    advice = Advice(schedule, every or 8, batch)
    said = advice.delays
    assert (said and said.removeprefix("delay of gradients in updates").lstrip(":, ")) == line
    assert advice.fewer_updates == fewer
    assert (advice.late_gradients() is None) == (line is None or greatest_delay(schedule, 0) <= 2)


def test_a_warning_names_deeper_warm_ups() -> None:
    deep, own = (build("pipedream", ((0,), (1,), (2,), (3,)), 4, 1, warmup=depths) for depths in ((9, 2, 1, 0), None))
    assert "; another optimizer; a lower warmup_depth; fewer stages" in str(
        Advice(deep, 4).late_gradients("another optimizer"))
    assert "warmup_depth" not in str(Advice(own, 4).late_gradients())


def test_fewer_updates_with_replicas() -> None:
    schedule = build("pipedream", ((0, 1), (2, 3), (4, 5)), 12, 1)
    assert Advice(schedule, 12, 24).fewer_updates == "update_every 3 (0.667 updates late; an update is then 12 samples)"
    assert Advice(schedule, 1, 24).fewer_updates == (
        "microbatches 6 and update_every 3 (0.667 updates late; an update is then 24 samples)")


def test_gradients_are_never_late_with_a_flush() -> None:
    schedule = build("1f1b", default_placement(4), 8)
    assert schedule.warmup == ()
    assert delays(schedule) == [(0, 0)] * 4
