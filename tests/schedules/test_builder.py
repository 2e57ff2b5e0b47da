"""Evaluations never make ranks wait for each other; reversed backwards are GPipe's, turned round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proved import prove

from vpipe.description.cut import Cut
from vpipe.description.order import Order
from vpipe.errors import UserError
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build, build_evaluation, described, proved
from vpipe.schedules.checker import channel_order, execute, matching, precedence
from vpipe.schedules.graph import Graph
from vpipe.schedules.kinds import Op
from vpipe.schedules.lowering import lower
from vpipe.schedules.rewrites import reverse_backwards
from vpipe.schedules.schedule import Schedule


@given(st.sampled_from(Layout), st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
def test_no_layout_deadlocks(layout: Layout, ranks: int, chunks: int, microbatches: int) -> None:
    schedule = lower(build_evaluation(layout(ranks, chunks), microbatches))
    for rule in (matching, precedence, channel_order):
        rule(schedule)
    for rendezvous in (False, True):
        assert execute(schedule.graph, rendezvous=rendezvous)[1] == {}
    forwards = [action for program in schedule.programs for action in program if action.op is Op.FORWARD]
    assert len(set(forwards)) == len(forwards) == microbatches * ranks * chunks


def test_a_v() -> None:
    schedule = lower(build_evaluation(Layout.ZIGZAG(2, 2), 2))
    assert [" ".join(map(str, program)) for program in schedule.programs] == [
        "0F0 0SEND_F0 3RECV_F0 0F1 0SEND_F1 3RECV_F1 3F0 3F1",
        "1RECV_F0 1F0 1RECV_F1 2F0 2SEND_F0 1F1 2F1 2SEND_F1"]


def compute(schedule: Schedule, rank: int) -> str:
    return " ".join(str(action)[1:] for action in schedule.programs[rank] if action.op.works)


def test_gpipe_with_its_backwards_reversed() -> None:
    schedule = prove("gpipe", Layout.LOOP(3), 4, last_first=True)
    assert [compute(schedule, rank) for rank in range(3)] == ["F0 F1 F2 F3 B3 B2 B1 B0 STEP0"] * 3
    assert schedule.name == "gpipe"
    assert compute(prove("gpipe", Layout.LOOP(3), 4), 1) == "F0 F1 F2 F3 B0 B1 B2 B3 STEP0"


def test_a_recomputation_stays_before_its_backward() -> None:
    reversed_order = reverse_backwards(build("gpipe", Layout.LOOP(2), 3, recompute=[0]))
    assert [compute(reversed_order, rank) for rank in range(2)] == [
        "F0 F1 F2 R2 B2 R1 B1 R0 B0 STEP0", "F0 F1 F2 B2 B1 B0 STEP0"]


@pytest.mark.parametrize("placement", [((0,),), ((0,), (1,), (2,)), ((0, 1), (2,)), ((0,), (1, 2), (3,))])
def test_reversed_backwards_are_proved_as_any(placement: tuple[tuple[int, ...], ...]) -> None:
    last = len(placement) - 1
    cut = Cut([1] * (last + 1), [[]] * last + [[last]], placement)
    built = described(Order("gpipe"), cut, 5, ties={0: (last,)} if last else {})
    schedule = proved(reverse_backwards(built), True)
    own = [action.microbatch for action in schedule.programs[placement[0][0]] if action.op is Op.BACKWARD]
    assert own == sorted(own, reverse=True)
    assert len(own) == -(-5 // len(placement[0]))


def test_no_other_schedule_can_be_reversed() -> None:
    with pytest.raises(UserError, match="'1f1b' cannot run its backwards from the last microbatch to the first"):
        reverse_backwards(described(Order("1f1b"), Cut(2), 4))


@pytest.mark.parametrize(("name", "graphs"), [("1f1b", 1), ("pipedream", 1), ("zb_v", 2)])
def test_a_schedule_has_one_graph(name: str, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering and proof ask the same one, but where receives are moved, as in zb_v: that is another schedule."""
    made, make = [], Graph.__init__
    monkeypatch.setattr(Graph, "__init__", lambda graph, *told: (made.append(graph), make(graph, *told))[1])
    proved(described(Order(name), Cut(4), 8))
    assert len(made) == graphs
