"""Stages in front that train nothing have no backwards: nothing waits for one, and what is left is proved again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from proved import prove

from vpipe.errors import CheckError
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build, with_frozen
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.kinds import Action
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.rewrites import freeze
from vpipe.schedules.simulator.timeline import simulate


def test_frozen_stages_only_send_forward() -> None:
    schedule = with_frozen(prove("1f1b", Layout.LOOP(3), 2, norm=True, recompute=[0, 2]), 1)
    assert [" ".join(str(action)[1:] for action in program) for program in schedule.programs] == [
        "F0 SEND_F0 F1 SEND_F1 NORM0 STEP0",
        "RECV_F0 RECV_F1 F0 SEND_F0 RECV_B0 F1 SEND_F1 RECV_B1 B0 B1 NORM0 STEP0",
        "RECV_F0 F0 R0 RECV_F1 B0 SEND_B0 F1 R1 B1 SEND_B1 NORM0 STEP0"]
    assert not any(kind.summed for kind in with_frozen(prove("1f1b", ((0, 1), (2,)), 2), 1).kinds), "no gradients"


@pytest.mark.parametrize("name", RegisteredSchedule.names())
def test_every_schedule_is_proved_with_frozen_stages(name: str) -> None:
    registered = RegisteredSchedule.named(name)
    whole = prove(name, registered.placement(4, None), 8, zero1=True)
    for frozen in range(1, whole.stages):
        schedule = with_frozen(whole, frozen)
        for rank, (peaks, before) in enumerate(zip(schedule.rank_peaks, whole.rank_peaks, strict=True)):
            trained = any(stage >= frozen for stage in schedule.stages_of(rank))
            assert peaks.peak_activations <= before.peak_activations * trained
        assert all(peaks.versions <= before.versions
                   for peaks, before in zip(schedule.stage_peaks, whole.stage_peaks, strict=True))


@pytest.mark.parametrize("placement", [((0, 1), (2,)), ((0,), (1, 2), (3,)), ((0,), (1,), (2, 3))])
def test_a_stream_is_held_back_by_the_first_stage_that_trains(placement: tuple[tuple[int, ...], ...]) -> None:
    """Replicas there, before it and after it; a frozen stage that ran ahead would read all of the data."""
    whole = prove("pipedream", placement, 24)
    costs = Costs((StageCosts(1, 1, 1),) * len(placement))
    begun = [max(event.end_s for events in simulate(schedule, costs).events[:1] for event in events)
             for schedule in (whole, with_frozen(whole, 1))]
    assert begun[0] - 8 < begun[1] <= begun[0]


def test_forwards_in_front_only_delay_the_beginning_of_the_trained_stages() -> None:
    trained = (StageCosts(1, 1, 1),) * 2
    costs = Costs((StageCosts(3, 0, 0),) * 2 + trained).with_transfers(1)
    whole, alone = build("1f1b", Layout.LOOP(4), 8), build("1f1b", Layout.LOOP(2), 8)
    rest = simulate(alone, Costs(trained).with_transfers(1)).makespan_s
    found = simulate(freeze(whole, 2), costs)
    assert found.makespan_s == 2 * (3 + 1) + rest == 43
    assert found.peak_bytes == (0, 0, 2, 1), "an activation is a byte"
    assert simulate(whole, costs).makespan_s == 49, "empty backwards hold forwards back"


def test_a_backward_that_is_not_needed_breaks_a_rule() -> None:
    schedule = freeze(build("zb_h1", Layout.LOOP(2), 2), 1)
    with pytest.raises(CheckError, match="0I1 stands in the programs, but stage 0 trains nothing"):
        check(schedule.with_programs([(*schedule.programs[0], Action.parse("0I1")), schedule.programs[1]]))
    with pytest.raises(CheckError, match="1B0 is missing"):
        check(replace(freeze(schedule, 2), frozen=1))
