"""Lowering: literal programs for small cases, where receives stand, and how streams repeat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proved import texts

from vpipe.schedules.assignment import Assignment, Layout, Placement, Setting
from vpipe.schedules.builder import build, replica_views, stream_program
from vpipe.schedules.kinds import Action, Op, forward
from vpipe.schedules.lowering import Lowering, lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.stream import StreamVersions


def lowered(name: str, ranks: int, microbatches: int, every: int | None = None, *, tied: bool = False,
            norm: bool = False) -> Schedule:
    placement = RegisteredSchedule.named(name).layout(ranks, RegisteredSchedule.named(name).chunks)
    ties = {0: (len(placement) - 1,)} if tied and len(placement) > 1 else {}
    return lower(build(name, placement, microbatches, every, ties), norm)


def test_transfers() -> None:
    assert texts(lowered("1f1b", 2, 2)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0STEP0",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1STEP0"]


def test_ties_and_norms() -> None:
    assert texts(lowered("pipedream", 2, 2, tied=True, norm=True)) == [
        "0RECV_TIED_G0 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0NORM0 0STEP0 "
        "0RECV_TIED_G1 0SEND_TIED_W1 0B1 0NORM1 0STEP1 0SEND_TIED_W2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 0SEND_TIED_G0 0RECV_TIED_W1 1NORM0 1STEP0 1F1 1B1 1SEND_B1 "
        "0SEND_TIED_G1 0RECV_TIED_W2 1NORM1 1STEP1"]


def test_halves_are_sent_and_waited_for_where_they_make_their_tensors() -> None:
    assert texts(lowered("zb_h1", 2, 2, tied=True)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0RECV_TIED_G0 0W1 0STEP0 0SEND_TIED_W1",
        "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 0SEND_TIED_G0 0RECV_TIED_W1 1STEP0"]


def test_replicas_sum_their_gradients_before_they_step() -> None:
    """Microbatches 0 and 2 on rank 0, 1 and 3 on rank 1; both get the borrowed weight's gradients, one lends it."""
    schedule = lower(build("1f1b", ((0, 1), (2,)), 4, ties={0: (1,)}), norm=True)
    assert texts(schedule) == [
        "0F0 0SEND_F0 0RECV_B0 0F2 0SEND_F2 0RECV_B2 0B0 0RECV_TIED_G0 0B2 0REDUCE_GRAD0 0NORM0 0STEP0 0SEND_TIED_W1",
        "0F1 0SEND_F1 0RECV_B1 0F3 0SEND_F3 0RECV_B3 0B1 0RECV_TIED_G0 0B3 0REDUCE_GRAD0 0NORM0 0STEP0",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1RECV_F3 1B2 1SEND_B2 1F3 1B3 1SEND_B3 "
        "0SEND_TIED_G0 0RECV_TIED_W1 1NORM0 1STEP0"]


def by_hand(*programs: str, ties: dict[int, tuple[int, ...]]) -> Schedule:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1; one microbatch."""
    actions = tuple(tuple(map(Action.parse, program.split())) for program in programs)
    return Schedule("made", Layout.ZIGZAG(2, 2), actions, 1, 1, flush=True, peak_activations=(2, 2),
                    versions=(1, 1, 1, 1), ties=ties)


def test_a_weight_borrowed_from_the_same_rank_and_by_another() -> None:
    """The owner steps when the borrower beside it has its gradients; both of its borrowers share its versions."""
    schedule = by_hand("0F0 3F0 3I0 0B0 0STEP0 3W0 3STEP0", "1F0 2F0 2B0 1B0 1STEP0 2STEP0", ties={0: (2, 3)})
    assert texts(lower(schedule, norm=True)) == [
        "3RECV_F0 0F0 0SEND_F0 3F0 0RECV_B0 3I0 3SEND_B0 0RECV_TIED_G0 0B0 3W0 0SEND_TIED_G0 0RECV_TIED_W1 "
        "0NORM0 3NORM0 0STEP0 0SEND_TIED_W1 3STEP0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 0SEND_TIED_G0 0RECV_TIED_W1 1B0 1SEND_B0 1NORM0 2NORM0 1STEP0 2STEP0"]


def schedules(*names: str) -> st.SearchStrategy[Schedule]:
    @st.composite
    def drawn(draw: st.DrawFn) -> Schedule:
        recipe = RegisteredSchedule.named(draw(st.sampled_from(names)))
        ranks = draw(st.integers(1, 8 // recipe.chunks))
        every = None if recipe.flush else draw(st.integers(recipe.update_every(ranks), recipe.update_every(ranks) + 2))
        microbatches = every * draw(st.integers(1, 4)) if every else draw(st.integers(2 * ranks, 24))
        return lowered(recipe.name, ranks, microbatches, every, tied=draw(st.booleans()), norm=draw(st.booleans()))

    return drawn()


ALL = ("gpipe", "1f1b", "zb_h1", "zb_h2", "looped_bfs", "zb_v", "pipedream", "2bw")


@given(schedules("gpipe", "1f1b", "zb_h1", "pipedream", "2bw"))
def test_a_transfer_has_a_computation_to_hide_behind(schedule: Schedule) -> None:
    """Between a receive and its use there is another computation, but for the first and a backward right behind
    its own forward (whose shapes are not known earlier)."""
    for program in schedule.programs:
        seen_compute = False
        for position, action in enumerate(program):
            if seen_compute and action.op is Op.RECV_F:
                between = program[position:program.index(forward(action.stage, action.microbatch))]
                assert any(other.op.computes for other in between)
            seen_compute = seen_compute or action.op is Op.FORWARD


def shifted(program: Sequence[Action], every: int) -> list[Action]:
    """The same actions one update later."""
    return [Action(action.op, action.stage, action.microbatch + (every if action.op.per_microbatch else 1))
            for action in program]


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize(("name", "more"), [("pipedream", 0), ("pipedream", 1), ("pipedream", 3), ("2bw", 0),
                                            ("2bw", 3), ("pipedream_vertical_sync", 0), ("pipedream_vertical_sync", 2)])
@pytest.mark.parametrize(("tied", "norm"), [(False, False), (True, False), (True, True)])
def test_a_stream_repeats(name: str, stages: int, more: int, tied: bool, norm: bool) -> None:
    """One more update is one more repetition inserted into each program: why a finite part proves a stream."""
    every = RegisteredSchedule.named(name).update_every(stages) + more
    enough = 4 * stages * every
    short = lowered(name, stages, enough, every, tied=tied, norm=norm)
    longer = lowered(name, stages, enough + every, every, tied=tied, norm=norm)
    for before, after in zip(short.programs, longer.programs, strict=True):
        period = len(after) - len(before)
        cooldown = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        assert shifted(before[cooldown:], every) == list(after[cooldown + period:])
        for start in (cooldown - period, cooldown - 2 * period):  # two are in the shorter one already
            assert shifted(after[start:start + period], every) == list(after[start + period:start + 2 * period])


def endless(name: str, placement: Placement, every: int, rank: int) -> Iterator[Action]:
    """The compute program of a rank, with microbatches without end."""
    recipe, assignment = RegisteredSchedule.named(name), Assignment(placement, every, False, lambda microbatch: True)
    return stream_program(recipe, replica_views(recipe, placement, 12 * every, every)[rank], assignment)


def test_a_stream_is_lowered_lazily() -> None:
    placement = Layout.LOOP(3)
    asked: list[Action] = []

    def compute() -> Iterator[Action]:
        for action in endless("pipedream", placement, 1, rank=2):
            asked.append(action)
            yield action

    assignment = Assignment(placement, 1, False, lambda microbatch: True)
    program = Lowering(Setting(assignment, {0: (2,)}), 2, compute).program()
    first = list(itertools.islice(program, 7))
    assert [str(action) for action in first] == [
        "2RECV_F0", "2F0", "2RECV_F1", "2B0", "2SEND_B0", "0SEND_TIED_G0", "0RECV_TIED_W1"]
    assert [str(action) for action in asked] == ["2F0", "2B0", "2STEP0", "2F1"]


def versions_of(name: str, every: int) -> StreamVersions:
    placement = Layout.LOOP(3)
    return StreamVersions(Assignment(placement, every, False, lambda number: True),
                          lambda rank: endless(name, placement, every, rank))


def test_versions_used() -> None:
    used = versions_of("pipedream", 2)
    assert [used.of(0, microbatch) for microbatch in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert used.of(0, 10_000) == (10_000 - 2) // 2
    assert used.of(0, 9_990) == (9_990 - 2) // 2


def test_a_use_action_says_from_when_on_a_version_is_used() -> None:
    used = versions_of("2bw", 3)
    assert [used.of(0, microbatch) for microbatch in range(12)] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
