"""What a stage holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vpipe.schedules.action import Action
from vpipe.schedules.check import prove
from vpipe.schedules.facts import Load, StageFacts, facts, loads
from vpipe.schedules.order import default_placement


def test_loads_action_by_action() -> None:
    texts = "0F0 0SEND_F0 0F1 0B0 0STEP0 0F2 0B1 0STEP1 0B2 0STEP2"
    program = [Action.parse(text) for text in texts.split()]
    assert list(loads(program, 0)) == [
        Load(0, 1, 1, 0), Load(2, 2, 1, 0), Load(3, 1, 1, 0),
        Load(4, 1, 2, 0),  # version 1, and version 0 for microbatch 1
        Load(5, 2, 2, 0), Load(6, 1, 1, 1),
        Load(7, 1, 2, 0), Load(8, 0, 1, 1), Load(9, 0, 1, 0)]
    assert list(loads(program, 1)) == []


def test_a_schedule_with_a_flush_holds_one_version() -> None:
    assert facts(prove("1f1b", default_placement(3), 4)) == (
        StageFacts(3, 1, 0), StageFacts(2, 1, 0), StageFacts(1, 1, 0))


def test_pipedream_as_in_its_paper() -> None:
    assert facts(prove("pipedream", default_placement(4), 16)) == (
        StageFacts(4, 4, 3), StageFacts(3, 3, 2), StageFacts(2, 2, 1), StageFacts(1, 1, 0))


def test_placement_does_not_matter() -> None:
    straight, turned = ((0,), (1,), (2,)), ((2,), (0,), (1,))
    assert facts(prove("pipedream", turned, 12)) == facts(prove("pipedream", straight, 12))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.sampled_from([1, 2, 3, 4]))
def test_a_stream_needs_fewer_versions_when_it_updates_less_often(stages: int, every: int) -> None:
    held = facts(prove("pipedream", default_placement(stages), 4 * stages * every, every))
    for stage, fact in enumerate(held):
        behind = stages - 1 - stage
        assert fact == StageFacts(behind + 1, -(-behind // every) + 1, -(-behind // every))
