"""Slices of sequences: what the checker proves of them, and the closed forms of their schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from proved import prove, texts
from test_checker import moved, swapped

from vpipe import Cut, Order
from vpipe.errors import CheckError, UserError
from vpipe.plan.solver.choice import placement_of_widths
from vpipe.schedules import registry
from vpipe.schedules.assignment import Assignment
from vpipe.schedules.builder import build, described, proved
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs
from vpipe.schedules.kinds import Action, Op, backward, forward, step
from vpipe.schedules.registry import RegisteredSchedule, register_schedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate

SLICED = [one.name for one in RegisteredSchedule.imported() if one.sliced]
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))  # ranks, microbatches, slices


def test_orders_literally() -> None:
    assert SLICED == ["gpipe", "seq1f1b"]
    assert texts(build("seq1f1b", 2, 2, slices=2)) == [
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2 0STEP0", "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2 1STEP0"]
    assert texts(build("gpipe", 1, 2, slices=2)) == ["0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2 0STEP0"]
    for ranks, microbatches in ((1, 3), (4, 2), (4, 9)):
        assert build("seq1f1b", ranks, microbatches).programs == build("1f1b", ranks, microbatches).programs


@pytest.mark.parametrize("name", SLICED)
@settings(max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 4), st.booleans(),
       st.booleans(), st.booleans())
@example([1, 2, 1], 3, 2, False, False, False)  # which no order of all replicas alike passes
@example([2, 2], 3, 2, True, True, True)
def test_any_size_is_proved(name: str, widths: list[int], slices: int, more: int, tied: bool, recomputed: bool,
                            zero1: bool) -> None:
    stages, microbatches = len(widths), max(widths) + more
    schedule = prove(name, placement_of_widths(widths), microbatches, norm=zero1, zero1=zero1, slices=slices,
                     ties={0: (stages - 1,)} if tied and stages > 1 else {},
                     recompute=range(0, stages, 2) if recomputed else ())
    assert [peaks.peak_activations for peaks in schedule.rank_peaks] == list(schedule.peak_activations)
    for stage, group in enumerate(schedule.placement):
        for replica, rank in enumerate(group):
            own = [action for action in schedule.programs[rank] if action.stage == stage]
            mine = range(replica, microbatches, len(group))
            assert [action.index for action in own if action.op is Op.FORWARD] == [
                m * slices + part for m in mine for part in range(slices)]
            assert [action.index for action in own if action.op is Op.BACKWARD] == [
                m * slices + part for m in mine for part in reversed(range(slices))]  # the order of the sums


@pytest.mark.parametrize("name", SLICED)
@given(SIZES, st.tuples(*[st.integers(1, 9)] * 3))
def test_bubble_and_activations(name: str, size: tuple[int, int, int], times: tuple[int, int, int]) -> None:
    """An n-th of the bubble of whole microbatches, whatever F, I and W."""
    ranks, microbatches, slices = size
    schedule = build(name, ranks, microbatches, slices=slices)
    costs = Costs.of_ranks(schedule.placement, slices=slices, forward_s=times[0], input_s=times[1], weight_s=times[2])
    timeline = simulate(schedule, costs)
    assert timeline.bubble_s == Fraction((ranks - 1) * sum(times), slices)
    held = [min(ranks - rank + slices - 1, microbatches * slices) if name == "seq1f1b" else microbatches * slices
            for rank in range(ranks)]
    assert list(timeline.peak_bytes) == [Fraction(count, slices) for count in held]


BROKEN: list[tuple[Callable[[Schedule], Schedule], str, str]] = [
    (lambda made: swapped(made, 0, "0F0", "0F1"), "0F1 (microbatch 0, slice 1) on rank 0 needs 0F0 (microbatch 0, "
     "slice 0) before it, which comes only later in the row", "place 0F0 before 0F1: a slice uses keys and values of "
     "those before it"),
    (lambda made: swapped(made, 1, "1B2", "1B3"), "1B2 (microbatch 1, slice 0) on rank 1 needs 1B3 (microbatch 1, "
     "slice 1) before it", "place 1B3 before 1B2: slices behind it add to the gradients of its keys and values"),
    (lambda made: moved(made, 0, "0B3", before="0STEP0"), "0B2 (microbatch 1, slice 0) on rank 0 needs 0B3", "place"),
    (lambda made: made.with_programs([[one for one in program if one != backward(0, 3)] for program in made.programs]),
     "0B3 is missing: stage 0 has no backward of microbatch 1, slice 1", "every slice goes forward and backward"),
    (lambda made: replace(made, peak_activations=(2, 2)), "3 slice-stages; the schedule states at most 2", "run"),
    (lambda made: replace(build("gpipe", 2, 1, slices=4), slices=3),
     "0B3 (microbatch 1, slice 0) on rank 0 needs 0B4 (microbatch 1, slice 1) before it, which is not there", "place"),
]


@pytest.mark.parametrize(("broken", "what", "hint"), BROKEN)
def test_a_broken_order(broken: Callable[[Schedule], Schedule], what: str, hint: str) -> None:
    made = build("seq1f1b", 2, 2, slices=2)
    with pytest.raises(CheckError) as raised:
        check(broken(made))
    first, *_, last = str(raised.value).splitlines()
    assert what in first
    assert hint in last


def test_a_microbatch_stays_on_one_replica() -> None:
    made = build("seq1f1b", ((0, 1),), 2, slices=2)
    assert texts(made) == ["0F0 0F1 0B1 0B0 0STEP0", "0F2 0F3 0B3 0B2 0STEP0"]
    apart = [[forward(0, 0), forward(0, 2), backward(0, 2), backward(0, 0), step(0, 0)],
             [forward(0, 1), forward(0, 3), backward(0, 3), backward(0, 1), step(0, 0)]]
    with pytest.raises(CheckError, match=r"0F2 stands on rank 0, but of the 2 replicas of stage 0 number 1, rank 1, "
                                         r"takes that slice(?s:.*)microbatch i goes to .* with all of its slices"):
        check(made.with_programs(apart))
    few = Assignment(((0, 1, 2),), 4, True, range(4).__contains__, slices=2)  # two microbatches for three replicas
    assert few.contributors(0, 0, 0) == [0, 1]
    assert [few.share(0, 0, 0, rank) for rank in range(3)] == [[0, 1], [2, 3], []]


def test_a_file_of_slices(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    made = build("seq1f1b", 2, 3, slices=2)
    path.write_text(made.to_csv())
    read = proved(described(Order(str(path), slices=2), Cut(2), 3)).compute_only()
    assert (read.programs, read.slices, read.peak_activations) == (made.programs, 2, made.peak_activations)
    with pytest.raises(UserError, match="is a schedule of 6 slices, not 4"):
        described(Order(str(path), slices=2), Cut(2), 2)
    with pytest.raises(UserError, match="cuts every microbatch into 2 slices, which PyTorch's runtime"):
        made.to_torch_csv()


@pytest.mark.parametrize("name", ["1f1b", "auto", "pipedream", "interleaved"])
def test_others_take_whole_microbatches(name: str) -> None:
    with pytest.raises(UserError, match=rf"slices is 2, but '{name}' takes whole microbatches\n.*: gpipe, seq1f1b"):
        described(Order(name, slices=2), Cut(4), 4)


def test_a_generator_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))

    @register_schedule("one_by_one", flush=True, sliced=True, peak_activations=lambda rank, size: size.slices)
    def one_by_one(rank: int, ranks: int, microbatches: int, slices: int) -> Iterator[Action]:
        for first in range(0, microbatches * slices, slices):
            yield from (forward(rank, first + part) for part in range(slices))
            yield from (backward(rank, first + part) for part in reversed(range(slices)))
        yield step(rank, 0)

    schedule = proved(described(Order("one_by_one", slices=3), Cut(2), 4))
    assert schedule.rank_peaks[0].peak_activations == 3
