"""The order of an evaluation never makes ranks wait for each other, whatever they hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vpipe.schedules.action import Op
from vpipe.schedules.execute import execute
from vpipe.schedules.reading import Reading
from vpipe.schedules.rules.transfers import channel_order, matching, precedence
from vpipe.schedules.size import Layout
from vpipe.schedules.wavefront import wavefront


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(Layout), st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
def test_no_layout_deadlocks(layout: Layout, ranks: int, chunks: int, microbatches: int) -> None:
    schedule = wavefront(layout.placement(ranks, chunks), microbatches)
    reading = Reading.of(schedule)
    for rule in (matching, precedence, channel_order):
        rule(reading)
    for rendezvous in (False, True):
        assert execute(reading, rendezvous=rendezvous)[1] == []
    forwards = [action for program in schedule.programs for action in program if action.op is Op.FORWARD]
    assert len(set(forwards)) == len(forwards) == microbatches * ranks * chunks


def test_a_v() -> None:
    assert [" ".join(map(str, program)) for program in wavefront(Layout.ZIGZAG.placement(2, 2), 2).programs] == [
        "0F0 0SEND_F0 3RECV_F0 0F1 0SEND_F1 3RECV_F1 3F0 3F1",
        "1RECV_F0 1F0 1RECV_F1 2F0 2SEND_F0 1F1 2F1 2SEND_F1"]
