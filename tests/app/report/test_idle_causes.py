"""Why ranks are idle: examples by hand, and sums that add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import GAP_S, LATENCY_S, SEND_S, TIMES, make_run

from vpipe.app.cli import main
from vpipe.app.report.figures import Figures, Window, rank_times, steady_window
from vpipe.app.report.idle_causes import Cause, Producers, TimeSlice, time_slices
from vpipe.app.report.recording import Recording, Track, read_recording
from vpipe.schedules.assignment import Placement
from vpipe.schedules.kinds import Action
from vpipe.schedules.trace import RecordedAction


def recording(*ranks: list[tuple[str, float, float, float]], placement: Placement | None = None,
              microbatches: int = 4) -> Recording:
    """(action, start, end, waited) per rank."""
    tracks = []
    for rank, lines in enumerate(ranks):
        actions = [Action.parse(text) for text, *_ in lines]
        tracks.append(Track(rank, "", [RecordedAction(action.op, action.stage, action.microbatch, start, end, waited,
                                                      0, 1)
                                       for action, (_, start, end, waited) in zip(actions, lines, strict=True)]))
    placement = placement or tuple((rank,) for rank in range(len(ranks)))
    return Recording("by hand", placement, True, microbatches, microbatches, (1,) * len(placement),
                     ((),) * len(placement), 8, tuple(tracks))


def idle(made: Recording, rank: int) -> list[tuple[float, float, Cause | None]]:
    found: list[TimeSlice] = list(time_slices(made, made.tracks[rank], Producers.from_recording(made)))
    return [(pytest.approx(start), pytest.approx(end), cause) for start, end, cause, _ in found if cause is not None]


def test_a_wait_is_bubble_until_its_input_is_made_and_the_transfers_from_then_on() -> None:
    made = recording([("0F0", 0, 10, 0)], [("1F0", 2, 30, 9)])  # waits from 2 to 11 for what is made at 10
    assert idle(made, 1) == [(0, 2, Cause.SCHEDULE), (2, 10, Cause.SCHEDULE), (10, 11, Cause.TRANSFER)]


def test_a_slow_producer_counts_as_a_straggler() -> None:
    made = recording([("0F0", 0, 10, 0), ("0F1", 10, 20, 0), ("0F2", 20, 35, 0)],
                     [("1F0", 0, 12, 11), ("1F1", 12, 22, 9), ("1F2", 22, 40, 14)])
    assert idle(made, 1)[-3:] == [(22, 30, Cause.SCHEDULE), (30, 35, Cause.STRAGGLER), (35, 36, Cause.TRANSFER)]


def test_a_straggler_costs_no_more_than_the_wait() -> None:
    made = recording([("0F0", 0, 10, 0), ("0F1", 10, 20, 0), ("0F2", 20, 35, 0)],
                     [("1F0", 0, 12, 11), ("1F1", 12, 33, 9), ("1F2", 33, 40, 2)])
    assert idle(made, 1)[-1] == (33, 35, Cause.STRAGGLER)


def test_the_wait_of_a_backward_is_for_the_stage_behind() -> None:
    made = recording([("0F0", 0, 1, 0), ("0B0", 1, 9, 6)], [("1F0", 0, 2, 1), ("1B0", 2, 6, 0)])
    assert idle(made, 0) == [(1, 6, Cause.SCHEDULE), (6, 7, Cause.TRANSFER)]


def test_the_wait_of_a_whole_backward_may_be_for_an_input_half() -> None:
    made = recording([("0F0", 0, 1, 0), ("0B0", 1, 9, 6)], [("1F0", 0, 2, 1), ("1I0", 2, 6, 0), ("1W0", 6, 8, 0)])
    assert idle(made, 0)[-1] == (6, 7, Cause.TRANSFER)


def test_time_between_actions_is_dispatch_and_after_the_last_one_bubble() -> None:
    made = recording([("0F0", 0, 1, 0), ("0F1", 3, 4, 0)], [("1F0", 0, 2, 1), ("1F1", 2, 9, 3)])
    assert idle(made, 0) == [(1, 3, Cause.DISPATCH), (4, 9, Cause.SCHEDULE)]


def test_before_an_evaluation_the_pipeline_empties() -> None:
    made = recording([("0F0", 0, 1, 0), ("0F1", 7, 8, 0)], [("1F0", 0, 3, 1), ("1F1", 8, 9, 1)])
    made = replace(made, tracks=(replace(made.tracks[0], evaluations=[(3, 6)]), made.tracks[1]))
    assert idle(made, 0) == [(1, 3, Cause.SCHEDULE), (6, 7, Cause.DISPATCH), (8, 9, Cause.SCHEDULE)]


def test_between_actions_a_rank_whose_input_is_not_made_yet_loses_nothing() -> None:
    """It may as well be held up there as in its next action."""
    made = recording([("0F0", 0, 10, 0)], [("1RECV_F0", 8, 8, 0), ("1F0", 12, 13, 0)])
    assert idle(made, 1) == [(0, 8, Cause.SCHEDULE), (8, 10, Cause.SCHEDULE), (10, 12, Cause.DISPATCH)]


def test_a_wait_whose_producer_was_not_recorded_has_no_known_cause() -> None:
    made = recording([("0F0", 0, 1, 0)], [("1F7", 0, 5, 4)])
    assert idle(made, 1) == [(0, 4, Cause.UNKNOWN)]


def test_replicas_wait_for_the_last_of_them() -> None:
    made = recording([("0F0", 0, 2, 0), ("0B0", 2, 4, 0), ("0REDUCE_GRAD0", 4, 9, 4), ("0STEP0", 9, 10, 0)],
                     [("0F1", 0, 3, 0), ("0B1", 3, 7, 0), ("0REDUCE_GRAD0", 7, 8, 0), ("0STEP0", 8, 12, 2)],
                     placement=((0, 1),), microbatches=2)
    # From 4 to 8 for the other's backward, which took 1 longer than the median of both.
    assert idle(made, 0)[:3] == [(4, 6, Cause.SCHEDULE), (6, 7, Cause.STRAGGLER), (7, 8, Cause.TRANSFER)]
    assert idle(made, 1) == [(8, 9, Cause.SCHEDULE), (9, 10, Cause.TRANSFER)]


def test_nobody_is_late_in_a_simulation() -> None:
    """Where ranks share cores, actions of one kind take different times there, too."""
    made = recording([("0F0", 0, 1, 0), ("0F1", 1, 2, 0), ("0F2", 2, 9, 0)],
                     [("1F0", 0, 2, 1), ("1F1", 2, 3, 0), ("1F2", 3, 10, 6)])
    [late, planned] = (list(time_slices(made, made.tracks[1], Producers.from_recording(made, simulated)))
                       for simulated in (False, True))
    assert Cause.STRAGGLER in {piece.cause for piece in late}
    assert Cause.STRAGGLER not in {piece.cause for piece in planned}


def test_a_step_waits_for_the_last_norm() -> None:
    made = recording([("0F0", 0, 1, 0), ("0NORM0", 1, 2, 0), ("0STEP0", 2, 9, 5)],
                     [("1F0", 0, 5, 1), ("1NORM0", 5, 6, 0), ("1STEP0", 6, 7, 0)])
    assert idle(made, 0) == [(2, 6, Cause.SCHEDULE), (6, 7, Cause.TRANSFER)]
    three = recording([("0F0", 0, 1, 0), ("0NORM0", 1, 2, 0), ("0STEP0", 2, 9, 5)],
                      [("1F0", 0, 3, 1), ("1NORM0", 3, 4, 0)], [("2F0", 0, 5, 3), ("2NORM0", 5, 6, 0)])
    assert idle(three, 0)[0] == (2, 6, Cause.SCHEDULE)


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "zb_v"])
def test_work_and_idle_time_add_up_to_the_span_of_every_rank(tmp_path: Path, name: str) -> None:
    made = read_recording(make_run(tmp_path / "run", name, updates=5, evaluation=name == "1f1b"))
    producers = Producers.from_recording(made)
    whole = Window(0, 5, 0.0, made.end_s)
    for window in (steady_window(made), whole):
        for time, track in zip(rank_times(made, window, producers), made.tracks, strict=True):
            evaluated = sum(max(0.0, min(end, window.end_s) - max(start, window.start_s))
                            for start, end in track.evaluations)
            assert sum(time.work.values()) + sum(time.idle.values()) == pytest.approx(window.span_s - evaluated)
            assert time.whole == pytest.approx(window.span_s - evaluated)


def test_no_time_is_left_out_or_counted_twice(tmp_path: Path) -> None:
    made = read_recording(make_run(tmp_path / "run", updates=4, evaluation=True))
    for track in made.tracks:
        now = 0.0
        for start, end, _, _ in time_slices(made, track, Producers.from_recording(made)):
            assert start == pytest.approx(now)
            assert end >= start
            now = end
        assert now == pytest.approx(made.end_s)


@settings(max_examples=15)
@given(st.integers(0, 3), st.integers(1, 3), st.floats(0.001, 0.1))
def test_one_slow_action_is_seen_as_long_as_it_was(stage: int, microbatch: int, extra_s: float) -> None:
    import tempfile

    slow = Action.parse(f"{stage}F{microbatch + 8}")  # in the second update
    with tempfile.TemporaryDirectory() as folder:
        made = read_recording(make_run(Path(folder) / "run", updates=3, took=lambda rank, action: (
            0.01 + extra_s * (action == slow))))
    times = rank_times(made, Window(0, 3, 0.0, made.end_s), Producers.from_recording(made))
    blamed = [time.idle.get(Cause.STRAGGLER, 0.0) for time in times]
    assert max(blamed) <= extra_s + 1e-9
    assert blamed[stage] == pytest.approx(0.0, abs=1e-9)  # nobody waits for itself


def test_transfers_take_what_they_take(tmp_path: Path) -> None:
    made = read_recording(make_run(tmp_path / "run", ranks=2, microbatches=1, updates=1, took=lambda *_: 0.01))
    slices = list(time_slices(made, made.tracks[1], Producers.from_recording(made)))
    found = [piece for piece in slices if piece.cause is Cause.TRANSFER]
    assert [piece.end_s - piece.start_s for piece in found] == [pytest.approx(SEND_S + LATENCY_S)]
    between = [piece for piece in slices if piece.cause is Cause.DISPATCH]
    assert {json.dumps(round(piece.end_s - piece.start_s, 9)) for piece in between} == {json.dumps(round(GAP_S, 9))}


def test_vpipe_watch_shows_the_causes_that_the_latest_actions_tell(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tenth of a run in which every update is alike has the causes of the whole."""
    folder = make_run(tmp_path, updates=40, took=lambda rank, action: TIMES[action.op] * (1 + 0.2 * rank))
    made = read_recording(folder)
    whole = Figures.from_recording(made, Producers.from_recording(made)).ranks
    (folder / "metrics.jsonl").write_text("")  # it has not ended
    tail = (folder / "trace" / "rank0.jsonl").stat().st_size // 10
    monkeypatch.setattr("vpipe.app.commands.watch.RECORD_BYTES", tail)
    assert main(["watch", str(folder)]) == 0
    title, head, *rows = [line.replace(" %", "").split() for line in capsys.readouterr().out.splitlines()[-6:]]
    assert 0 < float(title[2]) < made.end_s / 10, "seconds"
    assert head == ["rank", "stage", "work", "comm", "schedule", "transfer", "straggler", "between", "unknown"]
    for (_, _, work, _, *idle), time_ in zip(rows, whole, strict=True):
        assert float(work) == pytest.approx(100 * (time_.compute + time_.update) / time_.whole, abs=3)
        assert [float(part) for part in idle] == pytest.approx(
            [100 * time_.idle.get(cause, 0.0) / time_.whole for cause in Cause], abs=3)
    monkeypatch.setenv("COLUMNS", "60")
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "loss": 1, "samples_per_s": 9, "tokens_per_s": 9, "step_s": 1}\n')
    assert main(["watch", str(folder)]) == 0
    _, *narrow = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow)) <= 60
    assert [word for line in narrow if line.startswith("rank ") for word in line.split()] == [*head[:6], *head[:2],
                                                                                             *head[6:]]
    assert "9.0 samples/s" in narrow, "samples of one token have none"
    (folder / "trace" / "rank1.jsonl").write_text("")  # of a rank that has just begun
    assert main(["watch", str(folder)]) == 0
    assert "the latest " not in capsys.readouterr().out
