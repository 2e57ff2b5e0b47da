"""Ranks that share the cores of their host: examples by hand, and the work done at every moment."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulate import by_hand, times

from vpipe.errors import UserError
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, Link, Number, StageCosts
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.simulator.event_loop import SharedCores
from vpipe.schedules.simulator.timeline import Event, simulate

TWO = StageCosts(2, 1, 1)


def test_two_ranks_on_one_core_take_turns_or_go_half_as_fast() -> None:
    timeline = simulate(build("gpipe", Layout.LOOP(2), 2), Costs((TWO, TWO), cores=1))
    assert times(timeline, 0) == "0F0:0-2 0F1:2-6 0B0:10-14 0B1:14-16 0STEP0:16-16"
    assert times(timeline, 1) == "1F0:2-6 1F1:6-8 1B0:8-10 1B1:10-14 1STEP0:14-14"
    assert timeline.makespan_s == 16  # all the work there is, one after the other


def test_three_ranks_on_two_cores_each_have_two_thirds_of_one() -> None:
    three = by_hand("0F0 0B0 0STEP0", "0F1 0B1 0STEP0", "0F2 0B2 0STEP0", placement=((0, 1, 2),), microbatches=3)
    timeline = simulate(three, Costs((TWO,), cores=2))
    assert all(times(timeline, rank) == f"0F{rank}:0-3 0B{rank}:3-6 0STEP0:6-6" for rank in range(3))


def test_who_is_left_alone_has_the_core_to_itself() -> None:
    long = by_hand("0F0 0B0 0STEP0", "1F0 1B0 1STEP0", placement=Layout.LOOP(2), microbatches=1)
    stages = (StageCosts(1, 1, 1, step_s=4), StageCosts(3, 1, 1, step_s=1))
    # From 6 on the step of stage 1 (1) shares with the backward of stage 0 (2): both half as fast until 8, then alone.
    assert times(simulate(long, Costs(stages, cores=1)), 0) == "0F0:0-1 0B0:6-9 0STEP0:9-13"
    assert times(simulate(long, Costs(stages, cores=1)), 1) == "1F0:1-4 1B0:4-6 1STEP0:6-8"


def test_hosts_do_not_disturb_each_other() -> None:
    costs = Costs((TWO,) * 4)
    schedule = build("1f1b", Layout.LOOP(4), 4)
    apart = simulate(schedule, replace(costs, cores=1, hosts=(0, 1, 2, 3)))
    assert apart.events == simulate(schedule, costs).events
    pairs = simulate(schedule, replace(costs, cores=1, hosts=(0, 0, 1, 1)))
    assert apart.makespan_s < pairs.makespan_s < simulate(schedule, replace(costs, cores=1)).makespan_s


def test_a_transfer_takes_of_a_core_at_either_end() -> None:
    one = by_hand("0F0 0F1 0B0 0B1 0STEP0", "1F0 1F1 1B0 1B1 1STEP0", placement=Layout.LOOP(2), microbatches=2)
    costs = Costs((TWO, TWO), Link(1), cores=1)
    shared = simulate(one, costs)
    # 0F1 (2) shares with both ends of the first transfer (1 each): they are through at 5, it is at 6.
    assert times(shared, 0).startswith("0F0:0-2 0F1:2-")
    first = shared.transfers[0]
    assert (first.start_s, first.end_s) == (2, 5)
    assert shared.events[0][1].end_s > 6  # the forward of stage 1 has joined in
    apart = simulate(one, replace(costs, hosts=(0, 1)))
    assert (apart.transfers[0].start_s, apart.transfers[0].end_s) == (2, 4)  # half a core at the source, a whole beyond


ACTIONS = [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2), ("pipedream", 1)]


@given(st.sampled_from(ACTIONS), st.integers(2, 4), st.integers(1, 4), st.data())
def test_cores_are_busy_with_what_there_is_to_do(named: tuple[str, int], ranks: int, cores: int,
                                                 data: st.DataObject) -> None:
    name, chunks = named
    schedule = build(name, RegisteredSchedule.named(name).layout(ranks, chunks), 2 * ranks)
    stages = tuple(StageCosts(*data.draw(st.tuples(*[st.integers(1, 5)] * 3)), step_s=data.draw(st.integers(0, 3)))
                   for _ in range(ranks * chunks))
    hosts = data.draw(st.tuples(*[st.integers(0, 1)] * ranks))
    alone, shared = (simulate(schedule, Costs(stages, cores=count, hosts=hosts)) for count in (None, cores))
    for rank, (events, undisturbed) in enumerate(zip(shared.events, alone.events, strict=True)):
        beside = [event for other in range(ranks) if hosts[other] == hosts[rank] for event in shared.events[other]]
        times = sorted({time for event in beside for time in (event.start_s, event.end_s)})
        for event, alike in zip(events, undisturbed, strict=True):
            done: Number = 0
            for start, end in pairwise(times):
                if event.start_s <= start and end <= event.end_s:
                    done += (end - start) * min(1, Fraction(cores, _at_work(beside, start, end)))
            assert done == alike.end_s - alike.start_s  # the very work of the action, neither more nor less
            assert event.start_s >= alike.start_s  # nothing is earlier than where nobody disturbs it
            assert event.end_s >= alike.end_s
    if cores >= max(map(hosts.count, hosts)):
        assert shared.events == alone.events


def _at_work(events: list[Event], start: Number, end: Number) -> int:
    return sum(event.start_s <= start and end <= event.end_s for event in events)


def test_floats_come_to_the_same() -> None:
    schedule = build("1f1b", Layout.LOOP(4), 8)
    exact = simulate(schedule, Costs((StageCosts(3, 2, 2, step_s=1),) * 4, Link(Fraction(1, 3)), cores=3))
    floats = simulate(schedule, Costs((StageCosts(3.0, 2.0, 2.0, step_s=1.0),) * 4, Link(1 / 3), cores=3))
    assert float(floats.makespan_s) == pytest.approx(float(exact.makespan_s), rel=1e-12)


@pytest.mark.parametrize(("changed", "text"), [
    ({"cores": 0}, "a host has 0 cores"), ({"cores": 1, "hosts": (0, 0, 0)}, "there are hosts for 3 ranks, but")])
def test_impossible_numbers_of_cores_are_refused(changed: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text):
        simulate(build("1f1b", Layout.LOOP(2), 2), Costs((TWO, TWO), **changed))  # type: ignore[arg-type]


def test_who_joins_in_finds_the_others_half_done() -> None:
    """Only another host's news makes somebody begin while more are at work than there are cores."""
    host = SharedCores(1)
    host.begin(0, 1, 4)
    host.begin(0, 2, 4)
    host.begin(4, 3, 4)  # the others have had 2 each of the 4
    assert host.next_end() == 4 + 3 * 2
    assert host.finished(10) == [1, 2]
    assert host.next_end() == 10 + 2
    assert host.finished(12) == [3]
    assert host.next_end() is None
