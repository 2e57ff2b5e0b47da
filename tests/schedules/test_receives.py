"""Where receives are posted: never too late for a send, and in the order of sending, for any order of computing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vpipe.errors import CheckError
from vpipe.schedules.action import Action, Op
from vpipe.schedules.build import build
from vpipe.schedules.check import check
from vpipe.schedules.lower import lower
from vpipe.schedules.receive_order import post_in_time
from vpipe.schedules.schedule import Schedule, stages_of_rank
from vpipe.schedules.size import Layout, Placement, default_placement


def made(placement: Placement, programs: Sequence[str], microbatches: int) -> Schedule:
    actions = tuple(tuple(map(Action.parse, program.split())) for program in programs)
    return Schedule("made", placement, actions, microbatches, microbatches, flush=True,
                    peak_activations=(microbatches * len(placement),) * len(programs),
                    versions=(1,) * len(placement), ties={})


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]


def test_a_receive_stands_earlier_where_sends_would_wait_for_each_other() -> None:
    """Rank 0 sends its second microbatch before it takes the first one back, which rank 1 does the other way round."""
    lowered = lower(made(Layout.ZIGZAG.placement(2, 2), (
        "0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1 0STEP0 3STEP0", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1STEP0 2STEP0"), 2))
    check(lowered)
    assert texts(lowered)[1].startswith(
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 1RECV_F1 2B0 1B0 1SEND_B0 1F1 2F1 2SEND_F1 2RECV_B1")
    late = Action(Op.RECV_F, 1, 1), Action(Op.BACKWARD, 1, 0)
    program = [action for action in lowered.programs[1] if action != late[0]]
    program.insert(program.index(late[1]), late[0])  # right ahead of its use, as it would be
    with pytest.raises(CheckError, match="rank 0 stands before 0SEND_F1 and waits for 1RECV_F1 of rank 1"):
        check(lowered.with_programs([lowered.programs[0], program]))


def test_receives_are_posted_as_the_peer_sends() -> None:
    lowered = lower(made(default_placement(2), ("0F0 0F1 0B1 0B0 0STEP0", "1F1 1F0 1B1 1B0 1STEP0"), 2))
    check(lowered)
    assert texts(lowered)[1].startswith("1RECV_F0 1RECV_F1 1F1 1F0 1B1 1SEND_B1")


def test_a_gradient_is_not_received_before_its_forward() -> None:
    """Rank 0 would receive the gradient of microbatch 0 before the forward of 1, whose gradient is sent first."""
    lowered = lower(made(default_placement(2), ("0F0 0F1 0B0 0B1 0STEP0", "1F0 1F1 1B1 1B0 1STEP0"), 2))
    check(lowered)
    assert texts(lowered)[0] == "0F0 0SEND_F0 0F1 0RECV_B1 0RECV_B0 0SEND_F1 0B0 0B1 0STEP0"


def test_what_is_good_stays_as_it_is() -> None:
    for name in ("gpipe", "1f1b"):
        schedule = lower(build(name, default_placement(4), 8, ties={0: (3,)}), norm=True)
        assert post_in_time(schedule) == schedule


def test_what_deadlocks_anyway_stays_as_it_is() -> None:
    schedule = made(default_placement(2), ("0F0 0B0 0F1 0B1 0STEP0", "1F0 1F1 1B0 1B1 1STEP0"), 2)
    lowered = lower(schedule)
    assert post_in_time(lowered) == lowered
    with pytest.raises(CheckError, match="deadlock when sends never wait"):
        check(lowered)


@st.composite
def any_order(draw: st.DrawFn) -> tuple[Schedule, bool]:
    """A schedule whose ranks do any action that they can at any time, in whole backwards or halves, with ties."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stages = draw(st.integers(ranks, 8))
    homes = [*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(stages - ranks))]
    placement = tuple((rank,) for rank in draw(st.permutations(homes)))
    halved = draw(st.sets(st.integers(0, stages - 1)))
    left: dict[Action, list[Action]] = {}  # what every action waits for
    for microbatch in range(microbatches):
        for stage in range(stages):
            returning = Op.INPUT if stage in halved else Op.BACKWARD
            after = Op.INPUT if stage + 1 in halved else Op.BACKWARD
            forward = Action(Op.FORWARD, stage, microbatch)
            left[forward] = [Action(Op.FORWARD, stage - 1, microbatch)]
            left[Action(returning, stage, microbatch)] = [forward, Action(after, stage + 1, microbatch)]
            if stage in halved:
                left[Action(Op.WEIGHT, stage, microbatch)] = [Action(Op.INPUT, stage, microbatch)]
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    picks = draw(st.randoms(use_true_random=False))
    while left:
        action = picks.choice([action for action, before in left.items() if not any(one in left for one in before)])
        del left[action]
        programs[placement[action.stage][0]].append(action)
    for rank, program in enumerate(programs):
        program += [Action(Op.STEP, stage, 0) for stage in stages_of_rank(placement, rank)]
    ties = {owner: tuple(sorted(draw(st.sets(st.integers(owner + 1, stages - 1), min_size=1, max_size=3))))
            for owner in draw(st.sets(st.integers(0, stages - 2), max_size=2) if stages > 1 else st.just(set()))}
    return Schedule("any", placement, tuple(map(tuple, programs)), microbatches, microbatches, flush=True,
                    peak_activations=(microbatches * stages,) * ranks, versions=(1,) * stages, ties=ties), draw(
                        st.booleans())


@settings(deadline=None, max_examples=60)
@given(any_order())
def test_any_order_that_can_be_computed_can_be_lowered(order: tuple[Schedule, bool]) -> None:
    schedule, norm = order
    check(schedule)
    check(lower(schedule, norm))
