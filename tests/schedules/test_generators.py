"""The generators: some orders literally; valid for every size; memory and bubble by their closed forms."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from golden import assert_golden, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from proved import prove, texts

from vpipe.errors import CheckError, UserError
from vpipe.schedules.assignment import Size, both_ways
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, Number
from vpipe.schedules.kinds import HALF, SAVED, Op
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule, peak
from vpipe.schedules.simulator.timeline import simulate


def made(name: str, ranks: int, microbatches: int, chunks: int | None = None,
         update_every: int | None = None) -> Schedule:
    recipe = RegisteredSchedule.named(name)
    return build(name, recipe.layout(ranks, chunks or recipe.chunks), microbatches, update_every)


def bubble_s(schedule: Schedule, forward_s: Number = 1, input_s: Number = 1, weight_s: Number = 1) -> Number:
    """With the times of a whole rank."""
    size = Size(schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks, schedule.update_every)
    return simulate(schedule, Costs.uniform(size, forward_s, input_s, weight_s)).bubble_s


@st.composite
def proved(draw: st.DrawFn, name: str) -> Schedule | None:
    """A schedule that passed the checker; None where its numbers are refused."""
    recipe = RegisteredSchedule.named(name)
    ranks, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    chunks = draw(st.integers(1, 4)) if recipe.any_chunks else recipe.chunks
    try:
        return prove(name, recipe.layout(ranks, chunks), microbatches)
    except CheckError:
        raise
    except UserError:
        return None


@pytest.mark.parametrize("name", RegisteredSchedule.names())
@settings(max_examples=8)
@given(data=st.data())
def test_every_size_passes_or_is_refused(name: str, data: st.DataObject) -> None:
    schedule = data.draw(proved(name))
    if schedule is None:
        return
    for stage, rank in ((stage, rank) for stage, held_by in enumerate(schedule.placement) for rank in held_by):
        program = [action for action in schedule.programs[rank] if action.stage == stage]
        for ops in ((Op.BACKWARD, Op.INPUT), (Op.BACKWARD, Op.WEIGHT)):  # gradients accumulate in plain PyTorch's order
            order = [action.microbatch for action in program if action.op in ops]
            every = range(schedule.microbatches)
            assert order == list(schedule.assignment.taken(every, stage, rank) if schedule.flush else every)
        if schedule.flush:
            assert program[-1].op is Op.STEP
    if name not in AT_MOST:
        assert [fact.peak_activations for fact in schedule.rank_peaks] == list(schedule.peak_activations)


AT_MOST = {"v_half", "v_min", "auto"}  # their bounds count from F to W, or come from a limit


@pytest.mark.parametrize(("name", "most"), [("v_half", lambda p: (p + 2) // 2), ("v_min", lambda p: (p + 4) // 3)])
def test_memory_from_forward_to_weight_half(name: str, most: Callable[[int], int]) -> None:
    for ranks in range(1, 9):
        for microbatches in (1, 2, 5, 24):
            held = [peak(program, SAVED, HALF) for program in made(name, ranks, microbatches).programs]
            assert max(held) <= 2 * min(most(ranks), microbatches)
            if microbatches == 24:
                assert max(held) == 2 * most(ranks)


Bubble = Callable[[int, int, int, Number, Number, Number], Number]  # of p, m, v, F, I, W


def _looped(p: int, m: int, v: int, f: Number, i: Number, w: Number) -> Number:
    return (p - 1 + (v - 1) * max(0, p - m)) * (f + i + w) / Fraction(v)


CLOSED_FORMS: dict[str, tuple[Callable[[int, int, int], bool], Bubble]] = {  # where it holds, when W <= I <= F
    "gpipe": (lambda p, m, v: True, lambda p, m, v, f, i, w: (p - 1) * (f + i + w)),
    "1f1b": (lambda p, m, v: True, lambda p, m, v, f, i, w: (p - 1) * (f + i + w)),
    "interleaved": (lambda p, m, v: m % p == 0, lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / Fraction(v)),
    "interleaved_zb": (lambda p, m, v: m % p == 0, lambda p, m, v, f, i, w: (p - 1) * (f + i - w) / Fraction(v)),
    "looped_bfs": (lambda p, m, v: True, _looped),
    "zb_h1": (lambda p, m, v: m >= p, lambda p, m, v, f, i, w: (p - 1) * (f + i - w)),
    "zb_h2": (lambda p, m, v: m >= 2 * p - 1, lambda p, m, v, f, i, w: (p - 1) * (f + i - 2 * w)),
    "dualpipe_v": (lambda p, m, v: m >= 2 * p, lambda p, m, v, f, i, w: (p - 1) * (f + i - w) / Fraction(2)),
    "dualpipe": (lambda p, m, v: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
                 lambda p, m, v, f, i, w: (p // 2 - 1) * (f + i - w)),
    "chimera": (lambda p, m, v: p % 2 == 0 and m % p == 0,
                lambda p, m, v, f, i, w: (p - 2) * (m // p * (i + w) - (m // p - 1) * f)),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
@settings(max_examples=12)
@given(data=st.data())
def test_bubble(name: str, data: st.DataObject) -> None:
    holds, bubble = CLOSED_FORMS[name]
    recipe = RegisteredSchedule.named(name)
    ranks = data.draw(st.integers(1, 8)) * (2 if recipe.layout is both_ways else 1)
    chunks = data.draw(st.integers(1, 4)) if recipe.any_chunks else recipe.chunks
    fitting = [m for m in range(1, 33) if holds(ranks, m, chunks)]
    microbatches = data.draw(st.sampled_from(fitting))
    weight, its_input, forward = sorted(data.draw(st.tuples(*[st.integers(1, 6)] * 3)))
    if name in ("dualpipe_v", "dualpipe", "chimera"):
        forward = min(forward, its_input + weight)
    schedule = made(name, ranks, microbatches, chunks)
    assert (bubble_s(schedule, forward, its_input, weight)
            == bubble(ranks, microbatches, chunks, forward, its_input, weight))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_bubble_of_the_v_shaped_with_equal_times(ranks: int) -> None:
    for microbatches in (1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 24):
        short = 2 * ranks - microbatches - (microbatches <= ranks)
        assert bubble_s(made("zb_v", ranks, microbatches)) == max(0, short)
        if ranks > 1:
            assert bubble_s(made("v_min", ranks, microbatches)) == Fraction(4 * ranks - 5, 2)
        if microbatches >= 2 * ranks:
            assert bubble_s(made("v_half", ranks, microbatches)) <= Fraction(3 * ranks - 2, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bubble_of_waves(ranks: int) -> None:
    for microbatches in range(ranks, 18):
        assert bubble_s(made("hanayo", ranks, microbatches)) == 2 * (ranks - 1)
    for chunks in (4, 6):
        schedule = made("hanayo", ranks, 24 // (2 * ranks) * 2 * ranks, chunks)
        assert bubble_s(schedule) == Fraction(4 * (ranks - 1), chunks)


def test_golden_numbers_of_few_microbatches_and_of_memory() -> None:
    assert bubble_s(made("zb_h1", 4, 4)) == bubble_s(made("zb_h2", 4, 4)) == 3
    assert made("interleaved", 4, 4).rank_peaks[0].peak_activations == 4 * 2
    assert [(fact.peak_activations, fact.peak_weight_halves) for fact in made("interleaved_zb", 4, 8).rank_peaks] == [
        (8, 1), (7, 2), (6, 3), (5, 4)]


@pytest.mark.parametrize("ranks", range(2, 17, 2))
def test_chimera_as_published(ranks: int) -> None:
    """Table 2 and figure 6 of the paper: p forwards and 2p-2 backwards on the critical path, p/2+1 to p activations."""
    for units in range(1, 5):
        schedule = made("chimera", ranks, units * ranks)
        equal = simulate(schedule, Costs.uniform(Size(ranks, schedule.microbatches, 1, 1), 2, 1, 1))
        assert equal.bubble_share == Fraction(ranks - 2, 2 * schedule.microbatches + ranks - 2)
        peaks = [fact.peak_activations for fact in schedule.rank_peaks]
        assert peaks == [ranks // 2 + 1 + min(rank, ranks - 1 - rank) for rank in range(ranks)]
    unit = simulate(made("chimera", ranks, ranks), Costs.uniform(Size(ranks, ranks, 1, 1), 3, 2, 2))
    assert unit.makespan_s == ranks * 3 + (2 * ranks - 2) * 4


def test_some_orders_literally() -> None:
    assert texts(made("gpipe", 2, 2)) == ["0F0 0F1 0B0 0B1 0STEP0", "1F0 1F1 1B0 1B1 1STEP0"]
    assert texts(made("1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0STEP0",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1STEP0",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2STEP0"]
    assert texts(made("zb_h1", 2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2 0STEP0", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1STEP0"]
    assert texts(made("interleaved", 2, 2, 3))[0] == (
        "0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1 0STEP0 2STEP0 4STEP0")
    assert texts(made("interleaved_zb", 2, 2)) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1 0STEP0 2STEP0",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1 1STEP0 3STEP0"]
    assert texts(made("interleaved_zb", 3, 6, 1)) == texts(made("zb_h1", 3, 6))
    assert texts(made("zb_v", 1, 2)) == ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1 0STEP0 1STEP0"]


NUMBERS = [
    ("gpipe", 2, 0, 1), ("interleaved", 4, 6, 2), ("interleaved", 4, 3, 2), ("interleaved_zb", 2, 3, 2),
    ("dualpipe_v", 4, 6, 2), ("dualpipe_v", 1, 1, 2), ("chimera", 3, 6, 1), ("dualpipe", 1, 6, 1),
    ("dualpipe", 5, 20, 1), ("dualpipe", 4, 6, 1), ("dualpipe", 4, 11, 1), ("chimera", 2, 1, 1), ("hanayo", 2, 4, 3),
    ("hanayo", 2, 4, 1)]


def test_numbers_that_a_schedule_cannot_have() -> None:
    assert_golden(__file__, "numbers", {f"{numbers}": refusal(made, *numbers) for numbers in NUMBERS})
