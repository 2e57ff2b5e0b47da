"""Lowering: literal programs for small cases, where receives stand, and how streams repeat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vpipe.schedules.action import PER_MICROBATCH, RECEIVES, SENDS, Action, Op, forward
from vpipe.schedules.lower import Lowering, VersionsUsed, lower
from vpipe.schedules.order import Schedule, build, compute_program, default_placement
from vpipe.schedules.registry import recipe_named


def lowered(name: str, stages: int, microbatches: int, every: int | None = None, *, tied: bool = False,
            norm: bool = False) -> Schedule:
    ties = {0: (stages - 1,)} if tied and stages > 1 else {}
    return lower(build(name, default_placement(stages), microbatches, every, ties), norm)


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]


def test_transfers() -> None:
    assert texts(lowered("1f1b", 2, 2)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0STEP0",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1STEP0"]


def test_ties_and_norms() -> None:
    assert texts(lowered("pipedream", 2, 2, tied=True, norm=True)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_TIED_G0 0RECV_B1 0B0 0NORM0 0STEP0 "
        "0SEND_TIED_W1 0RECV_TIED_G1 0B1 0NORM1 0STEP1 0SEND_TIED_W2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 0SEND_TIED_G0 0RECV_TIED_W1 1NORM0 1STEP0 1F1 1B1 1SEND_B1 "
        "0SEND_TIED_G1 0RECV_TIED_W2 1NORM1 1STEP1"]


def test_one_stage_needs_no_transfers() -> None:
    assert texts(lowered("gpipe", 1, 2)) == ["0F0 0F1 0B0 0B1 0STEP0"]


def schedules(*names: str) -> st.SearchStrategy[Schedule]:
    @st.composite
    def drawn(draw: st.DrawFn) -> Schedule:
        name, every = draw(st.sampled_from(names)), draw(st.sampled_from([1, 2, 4]))
        microbatches = every * draw(st.integers(1, 24 // every))
        return lowered(name, draw(st.integers(1, 8)), microbatches, every if name == "pipedream" else None,
                       tied=draw(st.booleans()), norm=draw(st.booleans()))

    return drawn()


USES = {Op.RECV_F: Op.FORWARD, Op.RECV_B: Op.BACKWARD, Op.RECV_G: Op.STEP}


@settings(deadline=None)
@given(schedules("gpipe", "1f1b", "pipedream"))
def test_receives_precede_their_use_and_sends_follow_what_they_send(schedule: Schedule) -> None:
    for program in schedule.programs:
        at = {action: position for position, action in enumerate(program)}
        for action, position in at.items():
            if action.op in USES:
                assert position < at[Action(USES[action.op], action.stage, action.microbatch)]
            elif action.op in (Op.SEND_F, Op.SEND_B):
                op = Op.FORWARD if action.op is Op.SEND_F else Op.BACKWARD
                assert at[Action(op, action.stage, action.microbatch)] < position
            elif action.op is Op.SEND_W:
                assert at[Action(Op.STEP, action.stage, action.microbatch - 1)] < position


@settings(deadline=None)
@given(schedules("gpipe", "1f1b", "pipedream"))
def test_a_transfer_has_a_computation_to_hide_behind(schedule: Schedule) -> None:
    """Between a receive and its use there is another computation, but for the first and a backward right behind
    its own forward (whose shapes are not known earlier)."""
    for program in schedule.programs:
        seen_compute = False
        for position, action in enumerate(program):
            if seen_compute and action.op is Op.RECV_F:
                between = program[position:program.index(forward(action.stage, action.microbatch))]
                assert any(other.op in (Op.FORWARD, Op.BACKWARD) for other in between)
            seen_compute = seen_compute or action.op is Op.FORWARD


@settings(deadline=None)
@given(schedules("gpipe", "1f1b", "pipedream"))
def test_lowering_adds_and_moves_nothing_else(schedule: Schedule) -> None:
    every = None if schedule.flush else schedule.update_every
    bare = build(schedule.name, schedule.placement, schedule.microbatches, every)
    added = {Op.NORM} | SENDS | RECEIVES
    assert bare.programs == schedule.with_programs(
        [[action for action in program if action.op not in added] for program in schedule.programs]).programs


def shifted(program: Sequence[Action], every: int) -> list[Action]:
    """The same actions one update later."""
    return [Action(action.op, action.stage, action.microbatch + (every if action.op in PER_MICROBATCH else 1))
            for action in program]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize(("tied", "norm"), [(False, False), (True, False), (True, True)])
def test_a_stream_repeats(stages: int, every: int, tied: bool, norm: bool) -> None:
    """One more update is one more repetition inserted into each program: why a finite part proves a stream."""
    enough = 4 * stages * every
    short = lowered("pipedream", stages, enough, every, tied=tied, norm=norm)
    longer = lowered("pipedream", stages, enough + every, every, tied=tied, norm=norm)
    for before, after in zip(short.programs, longer.programs, strict=True):
        period = len(after) - len(before)
        cooldown = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        assert shifted(before[cooldown:], every) == list(after[cooldown + period:])
        for start in (cooldown - period, cooldown - 2 * period):  # two are in the shorter one already
            assert shifted(after[start:start + period], every) == list(after[start + period:start + 2 * period])


def test_a_stream_is_lowered_lazily() -> None:
    recipe, placement = recipe_named("pipedream"), default_placement(3)
    asked: list[Action] = []

    def compute(rank: int) -> Iterator[Action]:
        for action in compute_program(recipe, placement, rank, 10**12, 1):
            asked.append(action)
            yield action

    program = Lowering(placement, 2, compute, 1, {0: (2,)}).program()
    first = list(itertools.islice(program, 7))
    assert [str(action) for action in first] == [
        "2RECV_F0", "2F0", "2RECV_F1", "2B0", "2SEND_B0", "0SEND_TIED_G0", "0RECV_TIED_W1"]
    assert [str(action) for action in asked] == ["2F0", "2B0", "2STEP0", "2F1"]


def test_versions_used() -> None:
    program = compute_program(recipe_named("pipedream"), default_placement(3), 0, 10**12, 2)
    used = VersionsUsed(0, program)
    assert [used.of(microbatch) for microbatch in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert used.of(100_000) == (100_000 - 2) // 2
    assert used.of(99_990) == (99_990 - 2) // 2
