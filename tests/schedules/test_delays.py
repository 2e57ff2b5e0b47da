"""Hold the delays of gradients to their closed forms, and the ones read off the actions to these."""

from dataclasses import replace

import pytest

from vpipe.schedules.build import build
from vpipe.schedules.delays import greatest_delay, mean_delay
from vpipe.schedules.lower import lower
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import default_placement

PLACEMENTS = [default_placement(1), default_placement(4), ((0, 1), (2, 3), (4, 5)), ((0, 1, 2), (3,)),
              ((0,), (1, 2, 3), (4, 5))]
MORE = (3, 2, 2, 0)


def delays(schedule: Schedule) -> list[tuple[float, int]]:
    return [(mean_delay(schedule, stage), greatest_delay(schedule, stage)) for stage in range(schedule.stages)]


def read_off(schedule: Schedule) -> Schedule:
    """Return the same schedule without its name, so that nothing is known but its actions."""
    return replace(schedule, name="a.csv", stream=False)


@pytest.mark.parametrize("every", [1, 2, 3, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_mean_delay_is_the_warm_up_over_the_microbatches_of_an_update(
        placement: tuple[tuple[int, ...], ...], every: int) -> None:
    plain = build("pipedream", placement, 20 * 6 * every, every)
    own = plain.warmup
    assert own == tuple((sum(map(len, placement[s:])) - 1) // len(ranks) for s, ranks in enumerate(placement))
    for warmup in (own, tuple(depth + more for depth, more in zip(own, MORE[-len(own):], strict=True))):
        schedule = build("pipedream", placement, 20 * 6 * every, every, warmup=warmup)
        assert schedule.warmup == warmup
        assert delays(schedule) == [(depth / every, -(-depth // every)) for depth in warmup]
        assert delays(read_off(lower(schedule))) == delays(schedule)
        if len(set(map(len, placement))) == 1:
            synchronised = build("pipedream_vertical_sync", placement, 20 * 6 * every, every, warmup=warmup)
            assert delays(synchronised) == [(warmup[0] / every, -(-warmup[0] // every))] * len(placement)
            assert delays(read_off(synchronised)) == delays(synchronised)
        if every > max(warmup):
            double = build("2bw", placement, 20 * 6 * every, every, warmup=warmup)
            assert delays(double) == delays(read_off(double)) == [(1, 1)] * len(placement)


def test_gradients_are_never_late_with_a_flush() -> None:
    schedule = build("1f1b", default_placement(4), 8)
    assert schedule.warmup == ()
    assert delays(schedule) == [(0, 0)] * 4
