"""The automatic schedule: never worse than what is made by hand, within its memory, right by every rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proved import prove, texts

from vpipe.errors import UserError
from vpipe.schedules.assignment import Layout, Placement, Size
from vpipe.schedules.builder import build
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs, Link, StageCosts
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule, register_schedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.search.search import search
from vpipe.schedules.simulator.timeline import Timeline, simulate

V_OF_4 = Layout.ZIGZAG(4, 2)


def timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    size = Size(schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks, schedule.microbatches)
    return simulate(schedule, costs or Costs.uniform(size))


def by_hand(placement: Placement, microbatches: int) -> list[Schedule]:
    """Every schedule of fixed order and with a flush that runs there."""
    made = []
    for name in RegisteredSchedule.names():
        if RegisteredSchedule.named(name).flush and name != "auto":
            try:
                made.append(build(name, placement, microbatches))
            except UserError:
                continue
    return made


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCosts:
    forward_s = draw(st.integers(1, 5))
    return StageCosts(forward_s, draw(st.integers(1, 5)), draw(st.integers(0, 5)),
                      recompute_s=draw(st.sampled_from([0, 0, 0, forward_s])),
                      activation_bytes=draw(st.integers(2, 4)), weight_half_bytes=draw(st.integers(0, 5)),
                      kept_bytes=draw(st.integers(0, 1)), version_bytes=draw(st.integers(0, 2)),
                      output_bytes=1, gradient_bytes=draw(st.integers(0, 2)))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Placement, int, Costs, list[int | None]]:
    """Placement, microbatches, costs, and limits between one microbatch and all of them."""
    ranks, chunks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 8))
    placement = draw(st.sampled_from(Layout))(ranks, chunks)
    stages = tuple(draw(stage_costs()) for _ in placement)
    link = Link(draw(st.sampled_from([0, Fraction(1, 2), 2])), draw(st.sampled_from([math.inf, 2])))
    limits = []
    for rank in range(ranks):
        here = [cost for cost, (held_by,) in zip(stages, placement, strict=True) if held_by == rank]
        one = sum(int(cost.activation_bytes) for cost in here)
        versions = sum(int(cost.version_bytes) for cost in here)
        limits.append(draw(st.none() | st.integers(one, microbatches * one).map(versions.__add__)))
    return placement, microbatches, Costs(stages, link, overlap=draw(st.booleans())), limits


def keeps(peaks: Sequence[float | Fraction], limits: Sequence[int | None]) -> bool:
    return all(limit is None or peak <= limit for peak, limit in zip(peaks, limits, strict=True))


@given(problems())
def test_never_worse_than_any_made_by_hand_that_keeps_the_limits(
        problem: tuple[Placement, int, Costs, list[int | None]]) -> None:
    placement, microbatches, costs, limits = problem
    schedule = search(placement, microbatches, costs, limits)
    check(lower(schedule))
    for stage, (rank,) in enumerate(placement):  # gradients accumulate in plain PyTorch's order
        program = [action for action in schedule.programs[rank] if action.stage == stage]
        for ops in ((Op.FORWARD,), (Op.BACKWARD, Op.INPUT), (Op.BACKWARD, Op.WEIGHT)):
            assert [action.microbatch for action in program if action.op in ops] == list(range(microbatches))
        assert program[-1] == Action(Op.STEP, stage, 0)
    found = timeline(schedule, costs)
    assert keeps(found.peak_bytes, limits)
    assert schedule.peak_activations == tuple(rank.peak_activations for rank in schedule.rank_peaks)
    for other in by_hand(placement, microbatches):
        made = timeline(other, costs)
        if keeps(made.peak_bytes, limits):
            assert (found.bubble_s, found.makespan_s) <= (made.bubble_s, made.makespan_s)


@pytest.mark.parametrize(("placement", "microbatches", "limit", "bubble"), [
    (Layout.LOOP(4), 8, None, 0),  # ZB-H2
    (Layout.LOOP(4), 8, 7, 0),  # ... in its memory
    (Layout.LOOP(4), 8, 5, 2),  # between the two: nothing made by hand
    (Layout.LOOP(4), 8, 4, 3),  # ZB-H1, in the memory of 1F1B
    (Layout.LOOP(4), 8, 1, 48),  # one microbatch after the other
    (V_OF_4, 8, 8, 0),  # ZB-V, in the memory of 1F1B: stages are half as large
    (V_OF_4, 8, 2, 44),
    (Layout.LOOP(4, 2), 8, None, 0),  # interleaved has 9/2
])
def test_bubbles_at_equal_costs(placement: Placement, microbatches: int, limit: int | None, bubble: int) -> None:
    schedule = search(placement, microbatches, limits=limit)
    found = timeline(schedule)
    assert found.bubble_s <= bubble
    assert limit is None or max(found.peak_bytes) <= limit


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 5), (5, 7), (8, 9)])
def test_auto_is_no_longer_than_zb_h1_where_that_alone_is_shortest(ranks: int, microbatches: int) -> None:
    found, made = (timeline(build(name, Layout.LOOP(ranks), microbatches)) for name in ("auto", "zb_h1"))
    assert found.bubble_s < made.bubble_s
    assert found.makespan_s <= made.makespan_s


def test_the_same_every_time() -> None:
    costs = Costs(tuple(StageCosts(1.1 + stage / 7, 0.9, 0.7) for stage in range(8)), Link(0.05))
    assert texts(search(V_OF_4, 6, costs, 6)) == texts(search(V_OF_4, 6, costs, 6))


def test_a_limit_below_one_microbatch_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"memory limit of 1 on rank 0: one microbatch alone holds 2 there\n"
                                        r"hint: allow 2 or more on rank 0, 2 or more on rank 1"):
        search(Layout.LOOP(2, 2), 4, limits=1)
    costs = Costs((StageCosts(1, 1, 1), StageCosts(1, 1, 1, activation_bytes=5, version_bytes=3)))
    with pytest.raises(UserError, match="limit of 7 on rank 1: one microbatch alone holds 8 there"):
        search(Layout.LOOP(2), 4, costs, [None, 7])
    assert max(timeline(search(Layout.LOOP(2), 4, costs, [None, 8]), costs).peak_bytes) == 8


def test_weight_halves_larger_than_activations_are_not_kept_where_they_do_not_fit() -> None:
    costs = Costs((StageCosts(1, 1, 1, weight_half_bytes=3),) * 3)
    schedule = search(Layout.LOOP(3), 4, costs, 2)
    assert max(timeline(schedule, costs).peak_bytes) <= 2
    assert not any(action.op is Op.WEIGHT for program in schedule.programs for action in program)


def test_numbers_that_do_not_go_together() -> None:
    for arguments, text in (((3, {"costs": Costs((StageCosts(1, 1, 1),))}), "costs for 1 stages"),
                            ((3, {"limits": [1, 2, 3]}), "3 memory limits for 2 ranks"),
                            ((0, {}), "2 stages and 0 microbatches")):
        with pytest.raises(UserError, match=text):
            search(Layout.LOOP(2), arguments[0], **arguments[1])
    with pytest.raises(UserError, match="'1f1b' has one order, whatever the memory limit of 2"):
        build("1f1b", Layout.LOOP(2), 4, limits=2)


def test_by_name_on_any_placement() -> None:
    for placement in (V_OF_4, Layout.LOOP(4, 2), Layout.ZIGZAG(2, 3), ((1,), (0,), (0,), (1,))):
        schedule = prove("auto", placement, 6, ties={0: (len(placement) - 1,)}, recompute=(1,))
        assert schedule.placement == placement
        assert schedule.ties == {0: (len(placement) - 1,)}
        assert any(action.op is Op.RECOMPUTE for program in schedule.programs for action in program)
    size = Size(4, 8, 1, 8)
    made = lower(build("auto", Layout.LOOP(4), 8, costs=Costs.uniform(size, 3, 2, 1), limits=4))
    check(made)
    assert max(timeline(made, Costs.uniform(size, 3, 2, 1)).peak_bytes) <= 4
    programs = [list(RegisteredSchedule.named("auto").program(rank, 4, 8, chunks=2)) for rank in range(4)]
    assert programs == [list(program) for program in build("auto", Layout.LOOP(4, 2), 8).programs]


def test_the_best_placement() -> None:
    assert timeline(search(4, 8)).bubble_s == 0
    assert search(4, 8, chunks=1).placement == Layout.LOOP(4)
    assert search(4, 8, limits=1).placement == Layout.LOOP(4)  # two stages hold two

    def halved(placement: Placement) -> Costs:
        size = Fraction(4, len(placement))
        return Costs((StageCosts(size, size, size, activation_bytes=size, weight_half_bytes=size),) * len(placement))

    assert timeline(search(4, 8, costs=halved, limits=4), halved(V_OF_4)).bubble_s == 0  # ZB-V
    with pytest.raises(UserError, match="one microbatch alone holds 2"):
        search(4, 8, chunks=2, limits=1)


def test_a_registered_schedule_that_cannot_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RegisteredSchedule.named("1f1b")
    monkeypatch.setattr("vpipe.schedules.registry._REGISTERED", {"1f1b": made})

    @register_schedule("stuck", flush=True)
    def stuck(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
        yield from reversed(list(made.program(rank, ranks, microbatches)))

    found = timeline(search(Layout.LOOP(3), 4))
    assert found.bubble_s <= timeline(build("1f1b", Layout.LOOP(3), 4)).bubble_s
