"""Hold the delays of gradients to their closed forms, and the ones read off the actions to these."""

from dataclasses import replace

import pytest

from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.delays import greatest_delay, mean_delay
from vpipe.schedules.lowering import lower
from vpipe.schedules.schedule import Schedule

PLACEMENTS = [Layout.LOOP(1), Layout.LOOP(4), ((0, 1), (2, 3), (4, 5)), ((0, 1, 2), (3,)), ((0,), (1, 2, 3), (4, 5))]


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


def test_gradients_are_never_late_with_a_flush() -> None:
    schedule = build("1f1b", Layout.LOOP(4), 8)
    assert schedule.warmup == ()
    assert delays(schedule) == [(0, 0)] * 4
