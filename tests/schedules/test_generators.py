"""The generators: their orders and pictures literally, their closed forms as properties."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vpipe.errors import UserError
from vpipe.schedules.action import Action, Op
from vpipe.schedules.facts import facts
from vpipe.schedules.order import Schedule, build, default_placement
from vpipe.schedules.reading import Reading
from vpipe.schedules.registry import recipe_named, schedule_names

STAGES, MICROBATCHES = st.integers(1, 8), st.integers(1, 24)


def made(name: str, stages: int, microbatches: int, update_every: int | None = None) -> Schedule:
    return build(name, default_placement(stages), microbatches, update_every)


def timed(schedule: Schedule, forward_s: int = 1, backward_s: int = 2) -> dict[Action, int]:
    """When every action starts if it starts as soon as its tensors are there; a transfer and a step take no time."""
    starts: dict[Action, int] = {}
    ends: dict[tuple[Op, int, int], int] = {}
    clocks = [0] * len(schedule.programs)
    left = [list(reversed(program)) for program in schedule.programs]
    takes = {Op.FORWARD: forward_s, Op.BACKWARD: backward_s, Op.STEP: 0}
    while any(left):
        for rank, waiting in enumerate(left):
            while waiting:
                action = waiting[-1]
                before = action.stage + {Op.FORWARD: -1, Op.BACKWARD: 1, Op.STEP: schedule.stages}[action.op]
                tensor = (action.op, before, action.microbatch)
                if 0 <= before < schedule.stages and tensor not in ends:
                    break
                starts[action] = max(clocks[rank], ends.get(tensor, 0))
                clocks[rank] = ends[action.op, action.stage, action.microbatch] = starts[action] + takes[action.op]
                waiting.pop()
    return starts


def bubble_s(schedule: Schedule, forward_s: int, backward_s: int) -> int:
    """The most that a rank idles between its first start and its last end (FACTS.md)."""
    starts = timed(schedule, forward_s, backward_s)
    idle = []
    for program in schedule.programs:
        compute = [action for action in program if action.op is not Op.STEP]
        span = starts[compute[-1]] + backward_s - starts[compute[0]]
        idle.append(span - schedule.microbatches * (forward_s + backward_s))
    return max(idle)


def picture(schedule: Schedule) -> list[str]:
    """One row per rank, one column per unit of time; see the generators' docstrings."""
    starts = timed(schedule)
    rows = []
    for rank, program in enumerate(schedule.programs):
        cells = ["."] * (max(starts.values()) + 1)
        for action in program:
            if action.op is Op.STEP:
                cells[starts[action] - 1] = "-S"
                continue
            cells[starts[action]] = f"{action.op}{action.microbatch}"
            if action.op is Op.BACKWARD:
                cells[starts[action] + 1] = "--"
        rows.append(f"rank {rank}  " + " ".join(f"{cell:2}" for cell in cells))
    return [row.rstrip(" .") for row in rows]


def picture_in_docstring(name: str) -> list[str]:
    lines = (inspect.getdoc(recipe_named(name).program) or "").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("rank ")]


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]


def test_gpipe_of_three_stages() -> None:
    assert texts(made("gpipe", 3, 4)) == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0STEP0",
        "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 1STEP0",
        "2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 2STEP0"]


def test_1f1b_of_three_stages() -> None:
    assert texts(made("1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0STEP0",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1STEP0",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2STEP0"]


def test_pipedream_of_three_stages() -> None:
    assert texts(made("pipedream", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0STEP0 0F3 0B1 0STEP1 0B2 0STEP2 0B3 0STEP3",
        "1F0 1F1 1B0 1STEP0 1F2 1B1 1STEP1 1F3 1B2 1STEP2 1B3 1STEP3",
        "2F0 2B0 2STEP0 2F1 2B1 2STEP1 2F2 2B2 2STEP2 2F3 2B3 2STEP3"]


def test_pipedream_with_an_update_every_second_microbatch() -> None:
    assert texts(made("pipedream", 3, 4, 2)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0STEP0 0B2 0B3 0STEP1",
        "1F0 1F1 1B0 1F2 1B1 1STEP0 1F3 1B2 1B3 1STEP1",
        "2F0 2B0 2F1 2B1 2STEP0 2F2 2B2 2F3 2B3 2STEP1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_picture_in_the_docstring_is_the_execution(name: str) -> None:
    assert picture_in_docstring(name) == picture(made(name, 3, 4))


def test_the_picture_in_the_docstring_is_how_the_stream_begins() -> None:
    drawn = picture_in_docstring("pipedream")
    stream = picture(made("pipedream", 3, 12))
    assert len(drawn) == len(stream)
    for row, whole in zip(drawn, stream, strict=True):
        assert row.endswith(" ...")
        assert whole.startswith(row.removesuffix("..."))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@settings(deadline=None)
@given(stages=STAGES, microbatches=MICROBATCHES, forward_s=st.integers(1, 5), backward_s=st.integers(1, 5))
def test_bubble(name: str, stages: int, microbatches: int, forward_s: int, backward_s: int) -> None:
    assert (bubble_s(made(name, stages, microbatches), forward_s, backward_s)
            == (stages - 1) * (forward_s + backward_s))


@pytest.mark.parametrize(("stages", "microbatches", "bubble"), [(4, 8, 9), (8, 24, 21)])
def test_golden_bubbles(stages: int, microbatches: int, bubble: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert bubble_s(made(name, stages, microbatches), 1, 2) == bubble


@settings(deadline=None)
@given(stages=STAGES, microbatches=MICROBATCHES)
def test_pipedream_idles_only_while_it_fills_and_drains(stages: int, microbatches: int) -> None:
    assert bubble_s(made("pipedream", stages, microbatches), 1, 2) == (stages - 1) * 3


@settings(deadline=None)
@given(stages=STAGES, microbatches=MICROBATCHES)
def test_peak_activations(stages: int, microbatches: int) -> None:
    fewest = [min(stages - s, microbatches) for s in range(stages)]
    for name, peaks in (("gpipe", [microbatches] * stages), ("1f1b", fewest), ("pipedream", fewest)):
        schedule = made(name, stages, microbatches)
        assert list(schedule.peak_activations) == peaks
        assert [stage.peak_activations for stage in facts(schedule)] == peaks


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, int, int]:
    """Stages, microbatches per update, updates."""
    every = draw(st.sampled_from([1, 2, 4]))
    return draw(STAGES), every, draw(st.integers(1, 24 // every))


@settings(deadline=None)
@given(streams())
def test_pipedream_gives_every_microbatch_the_version_it_states(stream: tuple[int, int, int]) -> None:
    stages, every, updates = stream
    reading = Reading.of(made("pipedream", stages, every * updates, every))
    for (stage, microbatch), version in reading.version.items():
        assert version == max(0, (microbatch - (stages - 1 - stage)) // every)


def restricted(program: Iterator[Action], microbatches: int, every: int) -> list[Action]:
    """The actions on microbatches below a number, and the steps of the updates that these complete."""
    return [action for action in program
            if action.microbatch < (microbatches // every if action.op is Op.STEP else microbatches)]


@settings(deadline=None)
@given(streams(), st.integers(0, 12))
def test_pipedream_is_prefix_closed(stream: tuple[int, int, int], more: int) -> None:
    stages, every, updates = stream
    program, microbatches = recipe_named("pipedream").program, every * updates
    for rank in range(stages):
        longer = program(rank, stages, microbatches + more, every)
        assert restricted(longer, microbatches, every) == list(program(rank, stages, microbatches, every))


def test_numbers_that_no_schedule_can_have() -> None:
    for arguments, text in ((("gpipe", 0, 4), "0 stages"), (("gpipe", 2, 0), "0 microbatches"),
                            (("1f1b", 2, 4, 2), "update_every is 2"), (("pipedream", 2, 4, 3), "does not divide 4")):
        with pytest.raises(UserError, match=text):
            made(*arguments)


def test_names() -> None:
    assert {"gpipe", "1f1b", "pipedream"} <= set(schedule_names())
    with pytest.raises(UserError, match="did you mean 'pipedream'"):
        recipe_named("pipedreams")
