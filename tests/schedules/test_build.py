"""The order of an evaluation never makes ranks wait for each other, whatever they hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vpipe.schedules.action import Op
from vpipe.schedules.build import build_evaluation
from vpipe.schedules.deadlock import execute
from vpipe.schedules.dependencies import Dependencies
from vpipe.schedules.lower import lower
from vpipe.schedules.rules import channel_order, matching, precedence
from vpipe.schedules.size import Layout


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(Layout), st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
def test_no_layout_deadlocks(layout: Layout, ranks: int, chunks: int, microbatches: int) -> None:
    schedule = lower(build_evaluation(layout.placement(ranks, chunks), microbatches))
    deps = Dependencies.from_schedule(schedule)
    for rule in (matching, precedence, channel_order):
        rule(deps)
    for rendezvous in (False, True):
        assert execute(deps, rendezvous=rendezvous)[1] == []
    forwards = [action for program in schedule.programs for action in program if action.op is Op.FORWARD]
    assert len(set(forwards)) == len(forwards) == microbatches * ranks * chunks


def test_a_v() -> None:
    schedule = lower(build_evaluation(Layout.ZIGZAG.placement(2, 2), 2))
    assert [" ".join(map(str, program)) for program in schedule.programs] == [
        "0F0 0SEND_F0 3RECV_F0 0F1 0SEND_F1 3RECV_F1 3F0 3F1",
        "1RECV_F0 1F0 1RECV_F1 2F0 2SEND_F0 1F1 2F1 2SEND_F1"]
