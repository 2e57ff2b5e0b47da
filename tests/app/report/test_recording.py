"""Reading what ranks recorded: clocks, notes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import make_run

from vpipe.app.report.recording import read_recording
from vpipe.errors import UserError
from vpipe.schedules.kinds import Op


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", ranks=2, microbatches=2, updates=2)


def edit(run: Path, change: Callable[[list[str]], None]) -> None:
    path = run / "trace" / "rank1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    change(lines)
    path.write_text("".join(lines))


def edit_header(run: Path, key: str, value: object) -> None:
    def change(lines: list[str]) -> None:
        lines[0] = json.dumps({**json.loads(lines[0]), key: value}) + "\n"

    edit(run, change)


def test_actions_are_read_in_order_from_second_0(run: Path) -> None:
    recording = read_recording(run)
    first, second = recording.tracks
    assert [str(done.action) for done in first.actions[:4]] == ["0F0", "0SEND_F0", "0F1", "0SEND_F1"]
    assert first.actions[0].start_s == 0
    assert second.actions[0].op is Op.FORWARD
    assert second.actions[0].begun_s > first.actions[0].end_s
    assert (recording.schedule, recording.placement, recording.partition) == ("1f1b", ((0,), (1,)), (3, 3))
    assert first.weight_bytes == {0: 4_000_000}
    assert recording.notes == ()


def test_ranks_with_other_clocks_are_put_on_that_of_rank_0(tmp_path: Path) -> None:
    here = read_recording(make_run(tmp_path / "here", ranks=2, microbatches=2, updates=2))
    apart = read_recording(make_run(tmp_path / "apart", ranks=2, microbatches=2, updates=2, offsets=(0.0, -77.0)))
    for one, other in zip(here.tracks, apart.tracks, strict=True):
        for done, same in zip(one.actions, other.actions, strict=True):
            assert (done.start_s, done.end_s) == pytest.approx((same.start_s, same.end_s), abs=1e-9)


def test_a_clock_that_drifts_is_followed_between_two_comparisons(run: Path) -> None:
    before = read_recording(run).tracks[1].actions

    def drift(lines: list[str]) -> None:
        lines[1], lines[-1] = '{"clock": [0.0, 1.0]}\n', '{"clock": [1.0, 1.5]}\n'

    edit(run, drift)
    after = read_recording(run).tracks[1].actions
    for early, late in zip(before, after, strict=True):
        assert late.start_s == pytest.approx(early.start_s * 1.5 + 1.0, abs=0.01)  # rank 0's first start is at 50 us


def test_evaluations_are_kept_apart_from_actions(tmp_path: Path) -> None:
    recording = read_recording(make_run(tmp_path / "run", ranks=2, microbatches=2, updates=4, evaluation=True))
    for track in recording.tracks:
        ((start_s, end_s),) = track.evaluations
        assert end_s - start_s == pytest.approx(4.5)
        assert not any(done.start_s < end_s and start_s < done.end_s for done in track.actions)


def test_a_truncated_record_is_said(run: Path) -> None:
    edit(run, lambda lines: lines.append('{"truncated": true}\n'))
    recording = read_recording(run)
    count = len(recording.tracks[1].actions)
    assert recording.tracks[1].truncated
    assert recording.notes == (f"rank1.jsonl ends after {count} actions: recording has a limit. What came later is not "
                               "in this report.",)


def test_a_record_that_breaks_off_is_read_up_to_there_and_said(run: Path) -> None:
    whole = len(read_recording(run).tracks[1].actions)
    edit(run, lambda lines: lines.__setitem__(slice(-2, None), [lines[-2][:9]]))
    recording = read_recording(run)
    assert len(recording.tracks[1].actions) == whole - 1
    assert "rank1.jsonl breaks off in line" in recording.notes[0]
    assert recording.notes[1] == ("The run did not end well, or is still going: the records of 1 of 2 ranks have no "
                                  "end. Figures are of its first 0.2 s, as far as they all reach.")


def test_an_empty_record_is_said_to_be_empty(run: Path) -> None:
    edit(run, list[str].clear)
    with pytest.raises(UserError, match=r"the record rank1.jsonl is empty: rank 1 did not come to the end of"):
        read_recording(run)


@pytest.mark.parametrize("line", [
    "nonsense\n", "[]\n", "7\n", "{}\n", '["1F0", 0, 1, 0, 0]\n', '["1X0", 0, 1, 0, 0, 1]\n',
    '["7F0", 90, 91, 0, 0, 1]\n', '["1F0", 91, 90, 0, 0, 1]\n', '["1F0", 90, 91, 2, 0, 1]\n',
    '["1F0", 90, NaN, 0, 0, 1]\n', '["1F0", 90, 91, 0, -1, 1]\n', '["1F0", 0, 1, 0, 0, 1]\n',
    '{"evaluation": [2, 1]}\n', '["1F0", 90, 1e400, 0, 0, 1]\n', '[["1F0"], 90, 91, 0, 0, 1]\n'])
def test_a_damaged_line_is_refused_with_its_place(run: Path, line: str) -> None:
    edit(run, lambda lines: lines.append(line))
    number = len((run / "trace" / "rank1.jsonl").read_text().splitlines())
    with pytest.raises(UserError, match=rf"line {number} of the record is damaged.*rank1.jsonl:{number}\)"):
        read_recording(run)


@pytest.mark.parametrize(("key", "value"), [
    ("format", 2), ("placement", []), ("placement", [[0], []]), ("schedule", 3), ("flush", 1), ("microbatches", 0),
    ("partition", [3]), ("recomputed", [[0]]), ("weight_bytes", {"x": 1}), ("clock_offset_s", "now"), ("rank", 0)])
def test_a_damaged_header_is_refused_with_its_place(run: Path, key: str, value: object) -> None:
    edit_header(run, key, value)
    with pytest.raises(UserError, match=r"rank1.jsonl:1\)"):
        read_recording(run)


def test_records_of_different_runs_are_refused_with_both_values(run: Path) -> None:
    edit_header(run, "microbatches", 5)
    with pytest.raises(UserError, match=r"of different runs: microbatches is 5 and 2"):
        read_recording(run)


def test_a_missing_rank_is_named(run: Path) -> None:
    (run / "trace" / "rank1.jsonl").unlink()
    with pytest.raises(UserError, match=r"the run has 2 ranks, but the record of rank 1 is missing"):
        read_recording(run)


def test_a_folder_without_a_record_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no record of its actions.*\nhint: train with --set trace=true"):
        read_recording(tmp_path)
    with pytest.raises(UserError, match=r"there is no run folder"):
        read_recording(tmp_path / "other")
