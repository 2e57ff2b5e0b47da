"""The schedules without a flush: their orders, versions, staleness, memory, and that they are prefix-closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import pytest
from golden import assert_golden, refusal
from hypothesis import given
from hypothesis import strategies as st
from proved import prove, texts

from vpipe.description.cut import Cut
from vpipe.description.order import Asynchronous
from vpipe.errors import UserError
from vpipe.schedules.assignment import Layout, Size
from vpipe.schedules.builder import build, described
from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate

STREAMS = [name for name in RegisteredSchedule.names() if not RegisteredSchedule.named(name).flush]

VERSIONS: dict[str, Callable[[Sequence[int], int, int, int], int]] = {  # of (warm-up, k, stage, microbatch)
    "pipedream": lambda d, k, stage, i: max(0, (i - d[stage]) // k),
    "pipedream_vertical_sync": lambda d, k, stage, i: max(0, (i - d[0]) // k),
    "2bw": lambda d, k, stage, i: max(0, i // k - 1),
}


def made(name: str, ranks: int, microbatches: int, update_every: int | None = None,
         warmup: Sequence[int] | None = None) -> Schedule:
    return build(name, Layout.LOOP(ranks), microbatches, update_every, warmup=warmup)


@st.composite
def streams(draw: st.DrawFn, name: str) -> tuple[tuple[int, ...], int, int]:
    """Forwards of every rank before its first backward, microbatches per update, updates."""
    more = draw(st.lists(st.integers(0, 4), max_size=7).map(lambda numbers: [*sorted(numbers, reverse=True), 0]))
    warmup = tuple(len(more) - 1 - rank + extra for rank, extra in enumerate(more))
    every = RegisteredSchedule.named(name).update_every(warmup[0] + 1) + draw(st.integers(0, 4))
    return warmup, every, draw(st.integers(1, max(1, 24 // every)))


def test_pipedream_with_an_update_every_second_microbatch() -> None:
    assert texts(made("pipedream", 3, 4, 2)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0STEP0 0B2 0B3 0STEP1",
        "1F0 1F1 1B0 1F2 1B1 1STEP0 1F3 1B2 1B3 1STEP1",
        "2F0 2B0 2F1 2B1 2STEP0 2F2 2B2 2F3 2B3 2STEP1"]


def test_vertical_sync() -> None:
    assert texts(made("pipedream_vertical_sync", 2, 4)) == [
        "0F0 0F1 0B0 0STEP0 0F2 0B1 0STEP1 0F3 0B2 0STEP2 0B3 0STEP3",
        "1USE0 1F0 1B0 1STEP0 1F1 1B1 1USE1 1STEP1 1F2 1B2 1USE2 1STEP2 1F3 1B3 1USE3 1STEP3"]


def test_2bw_changes_over_before_a_step_would_make_a_third_version() -> None:
    assert texts(made("2bw", 2, 6, 2)) == [
        "0USE0 0F0 0F1 0B0 0F2 0B1 0STEP0 0F3 0B2 0USE1 0F4 0B3 0STEP1 0F5 0B4 0USE2 0B5 0STEP2",
        "1USE0 1F0 1B0 1F1 1B1 1STEP0 1F2 1B2 1F3 1B3 1USE1 1STEP1 1F4 1B4 1F5 1B5 1USE2 1STEP2"]


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data())
def test_versions(name: str, data: st.DataObject) -> None:
    warmup, every, updates = data.draw(streams(name))
    schedule = prove(name, Layout.LOOP(len(warmup)), every * updates, every, warmup=warmup)
    for (stage, microbatch), version in schedule.versions_used.items():
        assert version == VERSIONS[name](warmup, every, stage, microbatch)
    assert [fact.peak_activations for fact in schedule.rank_peaks] == list(schedule.peak_activations)


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data())
def test_versions_and_staleness_of_a_long_stream(name: str, data: st.DataObject) -> None:
    warmup, every, _ = data.draw(streams(name))
    schedule = made(name, len(warmup), every * (2 + -(-2 * (warmup[0] + 1) // every)), every, warmup)
    for stage, fact in enumerate(schedule.stage_peaks):
        behind = warmup[0 if name == "pipedream_vertical_sync" else stage]
        versions = 2 if name == "2bw" else 1 - -behind // every
        assert (fact.versions, fact.staleness) == (versions, versions - 1)
        assert schedule.versions[stage] == versions, "as the schedule states"


def used(program: Iterable[Action], microbatches: int, every: int) -> list[Action]:
    """The actions on microbatches below a number and the steps that these complete, each forward behind its USE."""
    kept: list[Action] = []
    chosen = None
    for action in program:
        if action.op is Op.USE:
            chosen = action
        elif action.microbatch < (microbatches // every if action.op is Op.STEP else microbatches):
            if action.op is Op.FORWARD and chosen is not None:
                kept.append(chosen)
                chosen = None
            kept.append(action)
    return kept


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data(), more=st.integers(0, 12))
def test_prefix_closed(name: str, data: st.DataObject, more: int) -> None:
    warmup, every, updates = data.draw(streams(name))
    program, microbatches, ranks = RegisteredSchedule.named(name).program, every * updates, len(warmup)
    for rank in range(ranks):
        longer = program(rank, ranks, microbatches + more, update_every=every, warmup=warmup)
        exact = program(rank, ranks, microbatches, update_every=every, warmup=warmup)
        assert used(longer, microbatches, every) == used(exact, microbatches, every)


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data())
def test_a_stream_idles_only_while_it_fills_and_drains(name: str, data: st.DataObject) -> None:
    warmup, every, updates = data.draw(streams(name))
    ranks = len(warmup)
    schedule = made(name, ranks, every * updates, every, warmup)
    costs = Costs.uniform(Size(ranks, every * updates, 1, every))
    assert simulate(schedule, costs).bubble_s == (ranks - 1) * 3


@pytest.mark.parametrize("name", STREAMS)
def test_more_forwards_ahead_hide_transfers(name: str) -> None:
    """p-s microbatches go round in each pair of ranks, so a transfer of h makes the period 2(p-1)/p h longer; with one
    more between each two ranks than 1F1B has, nobody waits."""

    def period(warmup: tuple[int, ...]) -> Number:
        costs = Costs.uniform(Size(4, 80, 1, 8), transfer=Fraction(1, 2))
        events = simulate(made(name, 4, 80, 8, warmup), costs).events[3]
        ends = {event.action.microbatch: event.end_s for event in events if event.action.op is Op.BACKWARD}
        return ratio(ends[71] - ends[31], 40)

    assert period((3, 2, 1, 0)) == Fraction(15, 4)
    assert period((5, 3, 2, 0)) == Fraction(7, 2)
    assert period((6, 4, 2, 0)) == 3


WARM_UPS = [
    ("pipedream", (3, 3, 1, 0)), ("pipedream", (3, 1, 1, 0)), ("2bw", (5, 4, 3, 2)), ("pipedream", (3, 2)),
    ("2bw", (9, 2, 1, 0)), ("1f1b", (4, 2, 1, 0))]


def test_warm_ups_that_do_not_fit() -> None:
    assert_golden(__file__, "warm-ups", [refusal(made, name, 4, 8, warmup=warmup) for name, warmup in WARM_UPS])
    for name, warmup in WARM_UPS:
        with pytest.raises(UserError):
            described(Asynchronous(name, warmup_depth=warmup), Cut(4), 8)


def test_numbers_that_no_stream_can_have() -> None:
    for arguments, text in ((("2bw", 4, 8, 2), "less than the 4 that '2bw' needs on 4 ranks"),
                            (("2bw", 4, 2), "updates every 4 microbatches or more, but there are only 2")):
        with pytest.raises(UserError, match=text):
            made(*arguments)
